"""Where the program `onnxgrail` starts: an interrupt ends it with one line, also while its modules are imported.

Imports run code of other packages and callbacks of the interpreter, which print or swallow what is raised in them.  So
until a command has all that it needs an interrupt raises nothing and ends the process; there is nothing to tidy yet.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading


def main() -> None:
    """Run the command line, which calls its context's object as soon as interrupts may be raised in it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background may be born without it
        signal.signal(signal.SIGINT, _leave)
    from onnxgrail.cli import main as commands

    try:
        commands(prog_name="onnxgrail", obj=_ready)
    except SystemExit as end:
        if isinstance(end.code, int):
            _end(end.code)
        raise


def _ready() -> None:
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    """End at once, as a command ends that was interrupted."""
    os.write(2 if sys.__stderr__ is None else sys.__stderr__.fileno(), b"Error: interrupted\n")
    os._exit(1)


def _end(code: int) -> None:
    """End without taking the interpreter apart, which frees one by one what the system frees at once: a quarter second.

    Returns where another thread still works or the last words cannot be said: Python knows what to do then.
    """
    if threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # the reader went away, it is closed, or there is none
        return
    os._exit(code)
