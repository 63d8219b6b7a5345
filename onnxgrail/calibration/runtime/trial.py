"""Trial run of a written model in a child process, since ONNX Runtime's optimizer can crash the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxgrail.calibration.runtime import child
from onnxgrail.calibration.runtime.session import CPU, LIBRARIES
from onnxgrail.calibration.runtime.threads import count
from onnxgrail.calibration.runtime.wording import reason_of
from onnxgrail.core import Array
from onnxgrail.machine.device import device_of
from onnxgrail.machine.files.temporary import scratch

CRASH = 2**31  # exit codes of crashed processes on Windows begin here
STOPPED = frozenset(getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGINT") if hasattr(signal, name))


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a model file's run in a child process.

    Attributes:
        problem: the problem; empty if the model ran, or if the child process could not decide.
        died: True if a signal ended the child process.
    """

    problem: str = ""
    died: bool = False


def try_out(path: Path, arrays: Sequence[Array] = (), *, providers: Sequence[str] = CPU) -> Trial:
    """Open a model file with default optimization in a child process, and run it on a feed.

    Args:
        path: the model file.
        arrays: one per input, in the order of the inputs; empty to open the model only.
        providers: execution providers of the session.
    """
    if not sys.executable:  # Python is embedded in another program
        return Trial()
    setup = {"providers": device_of(providers).providers, "threads": count(), "libraries": LIBRARIES.get()}
    with scratch() as folder:
        feed = _saved(arrays, folder / "feed.npz")
        command = [
            sys.executable,
            "-P",
            child.__file__,
            str(path.resolve()),
            feed,
            json.dumps(setup | {"parent": os.getpid()}),
        ]
        found = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run(command, cwd=folder, env=found, capture_output=True, check=False)
    return _judged(done.returncode, done.stdout.decode(errors="replace"))


def _saved(arrays: Sequence[Array], path: Path) -> str:
    """Return the name of a file with the arrays, or an empty string if there are none or numpy cannot store them."""
    plain = [array.astype(str) if array.dtype.kind == "O" else np.asarray(array) for array in arrays]
    if not plain or any(array.dtype.kind == "V" or not array.dtype.isbuiltin for array in plain):
        return ""
    np.savez(path, *plain)
    return str(path)


def _judged(code: int, text: str) -> Trial:
    """Return the trial that an exit code and the printed text of the child process mean."""
    if code == child.REFUSED:
        return Trial(problem=f"ONNX Runtime fails on it: {reason_of(text)}")
    if -code in STOPPED:  # most likely out of memory
        return Trial()
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Trial(problem=f"ONNX Runtime dies of {name}", died=True)
    if code >= CRASH:
        return Trial(problem=f"ONNX Runtime dies with exit code {code:#x}", died=True)
    return Trial()  # the child process itself failed
