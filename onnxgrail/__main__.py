"""The entry point of the program `onnxgrail`, with its handling of interrupts.

Imports run code of other packages and callbacks of the interpreter, which print or swallow exceptions.  So until the
imports of a command are done, an interrupt ends the process with one line; there is nothing to clean up yet.  After
that it raises `KeyboardInterrupt`, once.  After the command has ended, an interrupt does not change its exit code.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from onnxgrail.machine import streams, supervisor

raised: list[bool] = []
"""Not empty after an interrupt was raised."""


def main() -> None:
    """Run the command line; interrupts are raised in a command as soon as its imports are done."""
    streams.settle()  # first: libraries keep files open, which would get the number of a closed stream
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background jobs may ignore interrupts
    if ours:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # runs last: little is left to do
        signal.signal(signal.SIGINT, _leave)
    ended = supervisor.split()
    from onnxgrail.cli import main as commands

    code: object = 1
    try:
        try:
            commands(prog_name="onnxgrail", obj={"ready": _ready, "interrupted": lambda: bool(raised)})
        except SystemExit as end:
            sys.stdout.flush()
            code = end.code
    except KeyboardInterrupt:  # between two steps of the command line itself
        _tell("interrupted")
    except OSError as error:  # of output outside of commands, such as help
        _tell(f"{error.filename}: {error.strerror}")
    if ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(code if isinstance(code, int) else int(code is not None)))
    ended(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)  # type: ignore[arg-type]


def _ready() -> None:
    """Prepare for the work of a command, whose imports are done.

    Raises:
        OutputError: there is no folder for temporary files.
    """
    from onnxgrail.machine.files.temporary import temporary_folder

    if signal.getsignal(signal.SIGINT) is _leave:
        sys.unraisablehook = _again
        signal.signal(signal.SIGINT, _interrupt)
    temporary_folder()


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt; the next interrupt ends the process at once."""
    signal.signal(signal.SIGINT, _leave)
    raised.append(True)
    raise KeyboardInterrupt


def _again(lost: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again if a callback of the interpreter has swallowed it."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import threading

    signal.signal(signal.SIGINT, _interrupt)
    main = threading.main_thread().ident
    if main is not None:
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()


def _leave(*_: object) -> None:
    """End the process at once, with the message and exit code of an interrupted command."""
    _tell("interrupted")
    os._exit(1)


def _tell(message: str) -> None:
    try:
        os.write(2, f"Error: {message}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    main()
