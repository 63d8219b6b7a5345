"""One number of threads for ONNX Runtime and for the linear algebra that goes on beside its runs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

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


def of_algebra() -> int:
    """Threads of BLAS: half of all, since ONNX Runtime, which gives way, is running the next batch meanwhile."""
    return max(1, count() // 2)


def ahead(make: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """As `map`, but while the caller is busy with one result the next one is made.

    With one thread in all it is `map`.
    """
    if count() == 1:
        yield from map(make, items)
        return
    with ThreadPoolExecutor(1) as pool:
        pending: Future[Out] | None = None
        for item in items:
            following = pool.submit(make, item)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


@contextmanager
def pinned() -> Iterator[None]:
    """Hold BLAS to its threads: its sums depend on nothing else, and it does not crowd out the runtime."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(of_algebra()):
        yield
