"""The number of threads of ONNX Runtime and of linear algebra that runs at the same time."""

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

from onnxgrail.machine.amounts import whole
from onnxgrail.machine.group.sums import Shard

In = TypeVar("In")
Out = TypeVar("Out")
Sum = TypeVar("Sum")
Step = Callable[[int], Out]
"""Computes a result from a batch, given its place among the batches of the process."""

ROOM = 2**28  # bytes that the sums of additional parts may take

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@functools.cache
def count() -> int:
    """Return the number of threads: `OMP_NUM_THREADS` if set, else the physical cores that this process may use."""
    asked = whole(os.environ.get("OMP_NUM_THREADS", "").split(",")[0])
    if asked:
        return asked
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core(number) for number in os.sched_getaffinity(0)})


def _core(number: int) -> str:
    """Return a key that the hardware threads of a core share; the thread itself if the system does not report it."""
    try:
        return Path(SIBLINGS.format(number)).read_text(encoding="ascii")
    except OSError:
        return str(number)


def of_algebra() -> int:
    """Return the threads of BLAS: half of all, since ONNX Runtime runs the next batch at the same time."""
    return max(1, count() // 2)


def of_solving() -> int:
    """Return how many parts of a solution are computed at once; 1 if BLAS has several threads for each."""
    return count() if of_algebra() == 1 else 1


def ways(shard: Shard, room: int) -> int:
    """Return how many parts of the batches are processed in parallel, if the sums of each take `room` bytes.

    It determines the threads per run of the model, so it must not depend on the number of processes.
    """
    return min(count(), shard.leaves, ROOM // max(1, room) + 1)


def share(shard: Shard, parts: int, step: Step[Out], work: Callable[[Shard, Iterator[Out]], Sum]) -> list[Sum]:
    """Process the batches of this process in several parts in parallel, each with one thread of BLAS.

    With a single part, the next batch is computed during the work on the current batch.

    Args:
        shard: the batches.
        parts: result of `ways`; fewer are used if this process has fewer leaves.
        step: computes a result from a batch, given its place among those of this process.
        work: computes a result from a part, given the results of its batches.

    Returns:
        The results of `work`, in the order of the batches.
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
    """Run `step` on all batches as `share` does, and discard the results."""
    share(shard, parts, step, lambda _, made: deque(made, maxlen=0))


def ahead(make: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """Yield as `map` does, but compute the next result while the caller uses the current one.

    With one thread in total it is the same as `map`.
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
    """Limit the threads of BLAS: its sums depend on their number, and ONNX Runtime needs the other cores."""
    import scipy.linalg.lapack  # noqa: F401  it has a BLAS of its own, whose threads are limited only if it is loaded
    from threadpoolctl import threadpool_limits

    with threadpool_limits(of_algebra()):
        yield


def _blas(threads: int) -> AbstractContextManager[object]:
    """Set the threads of BLAS, inside `pinned`."""
    from threadpoolctl import threadpool_limits

    return nullcontext() if of_algebra() == threads else threadpool_limits(threads)


class _EndedError(Exception):
    """Another part has failed."""
