"""How much memory was needed, and giving it back to the system between steps of a long run."""

from __future__ import annotations

import ctypes
import gc
import sys

PILE = 2**28  # bytes that may have come and gone before memory is given back


def give_back() -> None:
    """Collect graphs that nobody holds any more, and return the free pages between what is left.

    Graphs are full of cycles, and the C library keeps what is freed for itself: on a large model both would pile up
    layer by layer.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


class Pile:
    """Memory that comes and goes step by step: whenever it comes to much, all of it is given back.

    That takes a while, and is only worth it where steps are heavy.
    """

    def __init__(self, *, heavy: bool) -> None:
        self._heavy, self._used = heavy, 0

    def add(self, size: int) -> None:
        """So many bytes have been used in the step that has just ended."""
        self._used += size
        if self._heavy and self._used > PILE:
            give_back()
            self._used = 0


def peak_rss_bytes() -> int | None:
    """Largest resident memory of this process so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
