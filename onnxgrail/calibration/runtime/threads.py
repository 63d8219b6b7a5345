"""One number of threads for ONNX Runtime and for the linear algebra that goes on beside its runs."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import TypeVar

from onnxgrail.machine.group.sums import Shard
from onnxgrail.machine.numerals import whole

In = TypeVar("In")
Out = TypeVar("Out")
Sum = TypeVar("Sum")
Step = Callable[[int], Out]
"""From the place of a batch among those of a process to what is made of it."""

ROOM = 2**28  # bytes that sums of more than one part may take besides

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@functools.cache
def count() -> int:
    """`OMP_NUM_THREADS` where that is set, else the physical cores that this process may use."""
    asked = whole(os.environ.get("OMP_NUM_THREADS", "").split(",")[0])
    if asked:
        return asked
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


def of_solving() -> int:
    """How many parts of a solution are made at once: BLAS with more threads of its own takes one call at a time."""
    return count() if of_algebra() == 1 else 1


def ways(shard: Shard, room: int) -> int:
    """In how many parts batches are gone through side by side, where the sums of each part take `room` bytes.

    It decides how many threads a run of the model has, and so must not depend on how many processes share the batches.
    """
    return min(count(), shard.leaves, ROOM // max(1, room) + 1)


def share(shard: Shard, parts: int, step: Step[Out], work: Callable[[Shard, Iterator[Out]], Sum]) -> list[Sum]:
    """Go through the batches of this process, in so many parts side by side, each with one thread of BLAS.

    With an only part, the next batch is made while the work on one goes on.

    Args:
        shard: the batches.
        parts: as many as `ways` says; fewer where this process has fewer leaves.
        step: makes something of a batch, whose place among those of this process it is told.
        work: makes something of a part, from what `step` made of its batches.

    Returns:
        What `work` gave, in the order of the batches.
    """
    if parts == 1:
        return [work(shard, ahead(step, range(len(shard.numbers))))]
    shards, first = shard.split(parts), shard.numbers.start
    ended = threading.Event()

    def made(part: Shard) -> Iterator[Out]:
        for number in part.numbers:
            if ended.is_set():
                raise _EndedError
            yield step(number - first)

    with _blas(1), ThreadPoolExecutor(len(shards)) as pool:
        try:
            threads = [pool.submit(copy_context().run, work, part, made(part)) for part in shards]
            done, _ = wait(threads, return_when=FIRST_EXCEPTION)
            for thread in done:
                thread.result()
        finally:
            ended.set()
        return [thread.result() for thread in threads]


def pass_by(shard: Shard, parts: int, step: Step[Out]) -> None:
    """What `share` does, but for the work."""
    share(shard, parts, step, lambda _, made: deque(made, maxlen=0))


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


def _blas(threads: int) -> AbstractContextManager[object]:
    """As `pinned`, inside it."""
    from threadpoolctl import threadpool_limits

    return nullcontext() if of_algebra() == threads else threadpool_limits(threads)


class _EndedError(Exception):
    """Another part has failed."""
