"""How much memory was needed, and giving it back to the system between steps of a long run."""

from __future__ import annotations

import ctypes
import gc
import sys


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


def peak_rss_bytes() -> int | None:
    """Largest resident memory of this process so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
