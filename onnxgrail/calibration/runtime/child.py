"""A standalone program that opens a model file in ONNX Runtime and runs it once.

`trial.py` runs this file in a child process, because ONNX Runtime can crash the process with a signal.  It does not
import onnxgrail, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
REFUSED = 7  # exit code: ONNX Runtime has raised an error, which is printed


def main(path: str, feed: str, setup: str) -> int:
    """Open the model with default optimization and run it.

    Args:
        path: the model file.
        feed: an .npz file with one array per input, in the order of the inputs; empty to run nothing.
        setup: JSON with `parent` (a process), `providers`, `threads` and `libraries` of custom operators.

    Returns:
        The exit code: 0, or `REFUSED`.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.loads(setup)
    _end_with(asked["parent"])
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = asked["threads"]
    try:
        for library in asked["libraries"]:
            options.register_custom_ops_library(library)
        session = ort.InferenceSession(path, options, providers=asked["providers"])
        if feed:
            with np.load(feed) as arrays:
                names = [port.name for port in session.get_inputs()]
                session.run(None, dict(zip(names, (arrays[key] for key in arrays.files), strict=True)))
    except Exception as error:  # noqa: BLE001  ONNX Runtime raises types of its own
        sys.stdout.write(str(error))
        return REFUSED
    return 0


def _end_with(parent: int) -> None:
    """End this process when the parent process ends, on Linux."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
