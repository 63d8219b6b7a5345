"""A run that is interrupted or terminated leaves the folder as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command import said

from .test_bad_input import listing

PAUSE = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born without it
import onnxgrail.{module} as module

def pause(*args, **options):
    Path({flag!r}).touch()
    time.sleep(60)

module.{name} = pause
from onnxgrail.cli import main
main(["compress", "m.onnx", "--ratio", "0.3", "--data", "d.npz"{words}])
"""


@pytest.mark.parametrize(
    ("module", "name", "words", "stop"),
    [
        ("calibration.stream.stream", "share", "", signal.SIGINT),
        ("graph.io.model_file", "Path.replace", "", signal.SIGINT),
        ("graph.io.model_file", "Path.replace", ', "--save-as-external-data"', signal.SIGTERM),
    ],
    ids=["calibrating", "writing", "terminated while writing"],
)
def test_an_interrupted_run_leaves_no_model(
    module: str, name: str, words: str, stop: signal.Signals, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = listing(folder)
    flag = tmp_path_factory.mktemp("flag") / "paused"
    code = PAUSE.format(module=module, name=name, words=words, flag=str(flag))
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        wait(flag)
        os.kill(process.pid, stop)
        _, stderr = process.communicate(timeout=30)
    if stop == signal.SIGINT:
        assert process.returncode == 1
        assert said(stderr).startswith("Error: interrupted. With --resume DIR ")
        assert said(stderr).count("\n") == 1
        assert listing(folder) == before
    else:
        visible = {n: b for n, b in listing(folder).items() if not n.startswith(".")}
        assert visible == before


def wait(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.02)
