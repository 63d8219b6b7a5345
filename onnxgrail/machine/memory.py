"""Peak memory of the process, and returning free memory to the system between steps of a long run."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
PILE = 2**28  # bytes that are used and freed before memory is returned


def give_back() -> None:
    """Collect unreferenced graphs, and return free memory pages to the system.

    Graphs contain reference cycles, and the C library keeps freed memory: on a large model both would grow layer by
    layer.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


class Pile:
    """A counter of used and freed memory; at `PILE` bytes all free memory is returned to the system.

    That takes time, and is only worth it if steps are heavy.
    """

    def __init__(self, *, heavy: bool) -> None:
        self._heavy, self._used = heavy, 0

    def add(self, size: int) -> None:
        """Count the bytes that the last step has used."""
        self._used += size
        if self._heavy and self._used > PILE:
            give_back()
            self._used = 0


def peak_rss_bytes() -> int | None:
    """Return the largest resident memory of this process so far in bytes; None if the system does not tell."""
    with contextlib.suppress(OSError):  # not on Linux
        # Not from getrusage: there, a process begins with the memory of the one that started it.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
