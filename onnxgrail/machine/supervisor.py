"""Run the program in a child process, so that a fatal signal becomes a one-line message and an exit code.

A fault in native code cannot be handled where it happens, because Python runs signal handlers between two of its
instructions. Truncating a file while ONNX Runtime has it mapped is such a fault (SIGBUS).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SELDOM = "Try the model in onnxruntime alone; if it runs there, please report it"
REASONS = {
    "SIGBUS": (
        "a file was cut short, or could not be read, while it was in use (SIGBUS)",
        "Repeat the command when nothing writes to the model or the data",
    ),
    "SIGKILL": (
        "the program was killed (SIGKILL), most likely because memory ran out",
        "Try a smaller --batch-size or fewer --samples",
    ),
    "SIGXCPU": ("the program used more processor time than it may (SIGXCPU)", "Raise the limit: ulimit -t"),
    **{
        name: (f"a library of native code crashed ({name}), most likely ONNX Runtime with this model", SELDOM)
        for name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE")
    },
}
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
NUDGES, PAUSE = 5, 0.1  # wake-ups of a child after a signal, and seconds before each
DIES_WITH_PARENT, PARENTS_DEATH = 1, 2  # PR_SET_PDEATHSIG and PR_GET_PDEATHSIG of <sys/prctl.h>


def split() -> Callable[[int], None]:
    """Continue in a child process; the original process ends as the child does, and never returns.

    If the child could outlive its parent (all systems but Linux), the program continues in this process.

    Returns:
        A function that takes the exit code when all work is done. That exit code is used even if the interpreter then
        crashes: libraries of native code may crash while they are unloaded.
    """
    prctl = _prctl()
    if prctl is None:
        return lambda _: None
    import mmap

    told = mmap.mmap(-1, 2)  # shared memory; a pipe could get the number of a closed standard stream
    passed_on = {getattr(signal, name) for name in PASSED_ON}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    parent, apart = os.getpid(), not _has_terminal()
    try:
        child = os.fork()
    except OSError:  # no process can be created
        child = 0
    else:
        if child == 0:
            _tie(parent, prctl, apart=apart)
    if child:
        status = _wait(child, passed_on, every=apart)
        _end(status, told[1] if told[0] else None)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return lambda code: told.__setitem__(slice(2), bytes((True, code & 0xFF)))


def _prctl() -> Any:
    """Return the system call that ties a process to its parent; None if it is not available."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        there = prctl(PARENTS_DEATH, ctypes.byref(ctypes.c_int())) == 0
    except (ImportError, OSError, AttributeError):
        return None
    return prctl if there else None


def _has_terminal() -> bool:
    """Return True if there is a terminal, which sends signals such as that of Ctrl-C to a whole process group."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _tie(parent: int, prctl: Any, *, apart: bool) -> None:
    """Have the system kill this process together with its parent.

    `apart` puts it into its own process group: signals to the group of its parent reach it through the parent, once.
    """
    if apart:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
    signal.signal(signal.SIGURG, lambda *_: None)  # its only effect is to wake the process
    prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def _wait(child: int, passed_on: set[signal.Signals], *, every: bool) -> int:
    """Pass signals on until the child has ended; return its status.

    If the child is in the same group, only signals sent by a process are passed on: those of a terminal reach both.
    Python runs handlers between two of its instructions. A signal that arrives just before a blocking system call is
    noted, but does not end the call; the next signal does.
    """
    wanted, nudges = passed_on | {signal.SIGCHLD}, 0
    while True:
        found = signal.sigtimedwait(wanted, PAUSE) if nudges else signal.sigwaitinfo(wanted)
        if found is None:
            nudges -= 1
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGURG)
            continue
        if found.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return status
            continue
        nudges = NUDGES
        if every or found.si_code <= 0:
            with contextlib.suppress(OSError):
                os.kill(child, found.si_signo)


def _end(status: int, told: int | None) -> None:
    """End as the child did, with a one-line message if a signal has ended it, whose temporary files are removed.

    Args:
        status: of the child, from the system.
        told: its exit code if its work was done before it ended.
    """
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    if told is not None:
        os._exit(told)
    _tidy()
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    text, hint = REASONS.get(name, (f"the program was ended by {name}", "Repeat the command"))
    with contextlib.suppress(OSError):  # stderr may be closed
        os.write(2, f"Error: {text}. {hint}\n".encode())
    if name not in REASONS:
        with contextlib.suppress(OSError, ValueError):  # signals that the C library reserves
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        os._exit(128 + number)  # signals from itself do not end the first process of a container
    os._exit(1)


def _tidy() -> None:
    """Remove the temporary files of runs that were killed, the child's among them."""
    with contextlib.suppress(OSError, ImportError, MemoryError):
        import tempfile

        from onnxgrail.machine.files import drafts

        drafts.clear(Path(tempfile.gettempdir()), drafts.SCRATCH)
