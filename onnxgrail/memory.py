"""Give memory back to the system between steps of a long run."""

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
