"""What a process that only compresses may set for itself, before numpy is imported; a library may not."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

from onnxgrail import processor

TRIM, MAP, ARENAS = -1, -3, -8  # numbers of glibc's mallopt
OBJECTS = 20_000  # that come before Python looks for cycles among them
KEPT, MAPPED = 2**28, 2**26  # bytes of freed memory that stay with the process; size from which a block is mapped


def tune() -> None:
    """Keep freed activations for the next batch, help OpenBLAS where it does not know the processor, count less often.

    Threads share one heap: each with its own would keep what the others could use.  Measured on MiniLM: half of the
    page faults, a tenth of a second and 30 MB less, second moments in half the time, and a tenth of a second less spent
    on looking for cycles.  Whatever the environment says stays as it is.
    """
    gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])
    if sys.platform != "linux":
        return
    if not any(name.startswith("MALLOC_") for name in os.environ):
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (AttributeError, OSError):  # another C library
            pass
        else:
            mallopt(MAP, MAPPED)
            mallopt(TRIM, KEPT)
            mallopt(ARENAS, 1)
    if "numpy" not in sys.modules and processor.is_newer(processor.described()):
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
