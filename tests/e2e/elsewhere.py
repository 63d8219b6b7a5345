"""Run commands, given as JSON, without what only Linux or Unix has; see `test_elsewhere.py`."""

from __future__ import annotations

import builtins
import ctypes
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

# What libraries look up when they are imported is looked up before anything is hidden.
import onnx_ir  # noqa: F401
import onnxruntime  # noqa: F401
import rich.console  # noqa: F401
import scipy.linalg  # noqa: F401

MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
CALLS = (
    "O_DIRECTORY O_NOFOLLOW O_PATH O_TMPFILE copy_file_range fchmod fork getloadavg getpgid getuid geteuid killpg "
    "memfd_create mkfifo posix_fadvise posix_fallocate pread preadv pwrite register_at_fork sched_getaffinity "
    "sched_setaffinity sendfile setsid statvfs sysconf uname wait4 waitid"
)
SIGNALS = (
    "SIGALRM SIGBUS SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGURG SIGUSR1 SIGUSR2 SIG_BLOCK SIG_SETMASK alarm "
    "pthread_kill pthread_sigmask setitimer sigtimedwait sigwait sigwaitinfo"
)


def hide() -> None:
    """Remove modules, system calls, signals, `/proc` and the handles of folders."""
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, CALLS), (signal, SIGNALS)):
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = "elsewhere"
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    shutil._rmtree_impl = getattr(shutil, "_rmtree_unsafe", None)  # type: ignore[attr-defined]  # of Python 3.14
    library, handle, file = ctypes.CDLL, os.open, builtins.open

    class Library(library):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, *rest: Any, **named: Any) -> None:
            if name is None and "onnxgrail" in sys._getframe(1).f_globals["__name__"]:
                raise TypeError("there is no library of the whole process")
            super().__init__(name, *rest, **named)

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if not isinstance(path, int):
            absent(path)
            if os.path.isdir(path):  # noqa: PTH112
                raise PermissionError(13, "Permission denied", str(path))
        return handle(path, flags, *rest, **named)

    def read(path: Any, *rest: Any, **named: Any) -> Any:
        absent(path)
        return file(path, *rest, **named)

    ctypes.CDLL, os.open, builtins.open, io.open = Library, opened, read, read  # type: ignore[misc, assignment]


def absent(path: Any) -> None:
    """Refuse the paths that only Linux has."""
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(path))


if __name__ == "__main__":
    hide()
    from onnxgrail.__main__ import main
    from onnxgrail.cli import main as commands

    *first, last = json.loads(sys.argv[1])
    for words in first:
        commands(words, standalone_mode=False)
    sys.argv[1:] = last
    main()
