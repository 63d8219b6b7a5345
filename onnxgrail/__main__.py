"""Where the program `onnxgrail` starts: an interrupt ends it with one line, whenever it comes.

Imports run code of other packages and callbacks of the interpreter, which print or swallow what is raised in them.  So
until a command has all that it needs an interrupt raises nothing and ends the process; there is nothing to tidy yet.
Then it raises `KeyboardInterrupt`, once.  When the command has ended, its exit code stands.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

from onnxgrail.machine import supervisor

raised: list[bool] = []
"""Holds something once an interrupt was raised."""


def main() -> None:
    """Run the command line, which says when its imports are done: from then on interrupts may be raised in it."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background may be born without
    if ours:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # runs last: little is left to do
        signal.signal(signal.SIGINT, _leave)
    ended = supervisor.split()
    from onnxgrail.cli import main as commands
    from onnxgrail.cli import settle

    settle()
    code: object = 1
    try:
        try:
            commands(prog_name="onnxgrail", obj={"ready": _ready, "interrupted": lambda: bool(raised)})
        except SystemExit as end:
            sys.stdout.flush()
            code = end.code
    except KeyboardInterrupt:  # between two steps of the command line itself
        _tell("interrupted")
    except OSError as error:  # of what is printed outside of commands, such as help
        _tell(f"{error.filename}: {error.strerror}")
    if ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(code if isinstance(code, int) else int(code is not None)))
    ended(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)  # type: ignore[arg-type]


def _ready() -> None:
    """Begin the work of a command, whose imports are done.

    Raises:
        OutputError: there is no folder for temporary files.
    """
    from onnxgrail.machine.files.temporary import temporary_folder

    if signal.getsignal(signal.SIGINT) is _leave:
        sys.unraisablehook = _again
        signal.signal(signal.SIGINT, _interrupt)
    temporary_folder()


def _interrupt(*_: object) -> None:
    """Raise where the program is; the next interrupt ends it at once."""
    signal.signal(signal.SIGINT, _leave)
    raised.append(True)
    raise KeyboardInterrupt


def _again(lost: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again that a callback of the interpreter has swallowed."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import threading

    signal.signal(signal.SIGINT, _interrupt)
    main = threading.main_thread().ident
    if main is not None:
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()


def _leave(*_: object) -> None:
    """End at once, as a command ends that was interrupted."""
    _tell("interrupted")
    os._exit(1)


def _tell(message: str) -> None:
    try:
        os.write(2, f"Error: {message}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    main()
