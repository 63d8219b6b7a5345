"""One number of threads for ONNX Runtime and for the linear algebra between its runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@functools.cache
def count() -> int:
    """`OMP_NUM_THREADS` where that is set, else the physical cores that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core(number) for number in os.sched_getaffinity(0)})


def _core(number: int) -> str:
    """What the hardware threads of one core have in common; the thread itself where the system does not say."""
    try:
        return Path(SIBLINGS.format(number)).read_text(encoding="ascii")
    except OSError:
        return str(number)


@contextmanager
def pinned() -> Iterator[None]:
    """Hold BLAS to `count()` threads: its sums depend on nothing else, and it does not crowd out the runtime."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(count()):
        yield
