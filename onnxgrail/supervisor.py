"""Run the program in a child process, so that a signal that ends it becomes one line and an exit code.

A fault in native code cannot be handled where it happens: Python's own handlers run between two of its instructions.
A file that is cut short while ONNX Runtime has it mapped is such a fault (SIGBUS).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

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
    **{
        name: (f"a library of native code crashed ({name}), most likely ONNX Runtime with this model", SELDOM)
        for name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE")
    },
}
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def split() -> None:
    """Go on in a child process; the process that was there before ends as the child does, and never returns.

    Where the child could outlive its parent, which is everywhere but on Linux, nothing happens.
    """
    if sys.platform != "linux":
        return
    passed_on = {getattr(signal, name) for name in PASSED_ON}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    parent, apart = os.getpid(), not _has_terminal()
    try:
        child = os.fork()
    except OSError:  # no process may be made
        child = 0
    else:
        if child == 0:
            _tie(parent, apart=apart)
    if child:
        _wait(child, passed_on, every=apart)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_terminal() -> bool:
    """Return True if there is a terminal that sends signals, such as that of Ctrl-C, to a whole group of processes."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _tie(parent: int, *, apart: bool) -> None:
    """Have the system kill this process together with its parent.

    `apart` puts it into a group of its own: what is sent to the group of its parent comes through the parent, once.
    """
    import ctypes

    if apart:
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _wait(child: int, passed_on: set[signal.Signals], *, every: bool) -> None:
    """Pass signals on until the child has ended, and end as it did.

    In one group with the child only those are passed on that a process sent: what a terminal sends reaches both.
    """
    while True:
        found = signal.sigwaitinfo(passed_on | {signal.SIGCHLD})
        if found.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
        elif every or found.si_code <= 0:
            os.kill(child, found.si_signo)
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if name in REASONS:
        text, hint = REASONS[name]
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, f"Error: {text}. {hint}\n".encode())
        os._exit(1)
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
