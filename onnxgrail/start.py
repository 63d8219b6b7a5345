"""Where the program `onnxgrail` starts: an interrupt ends it with one line, also while its modules are imported.

Imports run code of other packages and callbacks of the interpreter, which print or swallow what is raised in them.  So
until a command has all that it needs an interrupt raises nothing and ends the process; there is nothing to tidy yet.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys


def main() -> None:
    """Run the command line, which has the process tuned where it computes, and says when its imports are done.

    From then on interrupts may be raised in it, and Python looks for cycles, among what is made later; at the end they
    go with the process.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background may be born without it
        signal.signal(signal.SIGINT, _leave)
    from onnxgrail.cli import main as commands

    commands(prog_name="onnxgrail", obj={"tune": _tune, "ready": _ready})


def _tune() -> None:
    from onnxgrail.tuning import tune

    tune()


def _ready() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)  # the interpreter would take everything apart, piece by piece
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    """End at once, as a command ends that was interrupted."""
    os.write(2 if sys.__stderr__ is None else sys.__stderr__.fileno(), b"Error: interrupted\n")
    os._exit(1)
