"""Large products and solutions that several processes compute together, with the bits of one.

All of them execute the same program on the same numbers. Of an operation that is worth it, each computes some of the
parts into which the host splits it anyway, and gets the others from the other processes. Programs part ways where
rounding differs, so this needs processors and libraries that are alike.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.solve.linear import PARTS, Host, linear, parts_of, using
from onnxgrail.core import Floats
from onnxgrail.machine.group.sums import SOLO, Group

DEEP = 512  # products per number from which it takes longer to compute than to send
MUCH = 2**30  # products of an operation that are worth a message, about 15 ms


@dataclass(frozen=True, slots=True)
class Shared(Host):
    """The backend of a process that computes together with others.

    Attributes:
        group: the processes.
        crew: how many of them, from the first, compute together.
    """

    group: Group = SOLO
    crew: int = 1

    def _in_parts(self, work: Callable[[slice], None], target: Floats, axis: int, depth: int) -> None:
        """Call `work` for some parts of a target, and get the others from the other processes."""
        found = _parts(target, axis)
        if depth < DEEP or target.size * depth < MUCH or len(found) == 1:
            Host._in_parts(self, work, target, axis, depth)
            return
        dealt = [found[rank :: self.crew] for rank in range(self.crew)]
        self._in_threads(work, [part for part, _ in dealt[self.group.rank]])
        own = [np.ascontiguousarray(rows).reshape(-1) for _, rows in dealt[self.group.rank]]
        places = {rank: [rows.reshape(-1) for _, rows in some] for rank, some in enumerate(dealt)}
        for some, arrays in zip(dealt, self.group.exchange(own, self.crew, places), strict=True):
            for (_, rows), array in zip(some, arrays, strict=True):
                if not np.may_share_memory(rows, array):
                    rows[...] = array.reshape(rows.shape)

    def each(self, items: Sequence[int], make: Callable[[int], Floats]) -> Iterator[Floats]:
        """Yield what `make` returns for each item, flat; process i makes the items i, i + crew, ... alone."""
        for first in range(0, len(items), self.crew):
            some = items[first : first + self.crew]
            with using(Host(self.threads)):
                own = [make(item) for item in some if item % self.crew == self.group.rank]
            given = [iter(arrays) for arrays in self.group.exchange(own, self.crew)]
            for item in some:
                yield next(given[item % self.crew])


def _parts(target: Floats, axis: int) -> list[tuple[slice, Floats]]:
    """Return the parts of a target, and each as rows."""
    rows = target.T if axis else target
    return [(part, rows[part]) for part in parts_of(len(rows))]


def each(items: Sequence[int], make: Callable[[int], Floats]) -> Iterator[Floats]:
    """Yield what `make` returns for each item, perhaps flat: an array of float64 that is cheap to send.

    Processes that compute together make several items at the same time, process i those of the numbers i, i + crew, ...
    So `make` may be called for an item that the caller does not come to, and not for all items in this process.
    """
    chosen = linear()
    yield from chosen.each(items, make) if isinstance(chosen, Shared) else map(make, items)


def crew_of(group: Group) -> int:
    """Return how many processes of a group, from the first, can compute together: one if they are not alike.

    All processes must call it. An operation on the host has so many parts; a GPU computes it alone.
    """
    chosen = linear()
    host = isinstance(chosen, Host)
    alike = group.size > 1 and group.agree(f"{host} {_libraries()}")
    return min(group.size, PARTS) if host and alike else 1


def together(group: Group, crew: int) -> AbstractContextManager[None]:
    """Compute together with other processes within a with-block, which the first `crew` processes execute."""
    chosen = linear()
    return using(Shared(chosen.threads, group, crew)) if crew > 1 and isinstance(chosen, Host) else nullcontext()


@functools.cache
def _libraries() -> str:
    """Return what rounding depends on: kernels and threads of all libraries for linear algebra."""
    import scipy.linalg.lapack  # noqa: F401  it brings a library of its own
    from threadpoolctl import threadpool_info

    names = ("internal_api", "version", "architecture", "num_threads")
    found = sorted({str([one.get(name) for name in names]) for one in threadpool_info() if one["user_api"] == "blas"})
    return f"{platform.machine()} {platform.python_version()} {np.__version__} {found}"
