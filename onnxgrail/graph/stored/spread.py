"""Constants that repeat their numbers: which numbers are stored, and how they are laid out over the shape.

Exporters use `Expand`, `Tile` or broadcasting to fill an array with one number per channel.  Materialized, such a
constant is as large as an activation, so only its core is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onnxgrail.core import Array, Bools, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Dim:
    """A dimension of the layout.

    Attributes:
        axis: the axis of the constant that it is part of.
        repeated: all positions hold the same numbers, so only one is stored.
        units: (size,) unit number of every position, 0 if it always stays.
    """

    axis: int
    repeated: bool
    units: Ints

    def alive(self, dead: Bools) -> Bools:
        """Return a mask of the positions that stay, (size,)."""
        return ~dead[self.units]


class Core(NamedTuple):
    """The stored part of a narrowed constant.

    Attributes:
        array: the core.
        expanded: the shape to which the core is expanded.
        shape: the shape of the constant.
    """

    array: Array
    expanded: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The layout of a constant that repeats its numbers; dimensions of the same axis follow each other."""

    dims: tuple[Dim, ...]
    rank: int

    def left(self, dead: Bools) -> int:
        """Count the numbers that are stored without the dead units."""
        return math.prod(int(dim.alive(dead).sum()) for dim in self.dims if not dim.repeated)

    def core(self, array: Array, dead: Bools) -> Core | None:
        """Return the stored part without the dead units; None if the remaining numbers do not repeat this way.

        Args:
            array: the constant at full size; numbers at removed positions do not matter.
            dead: (ids,) mask of removed units.
        """
        whole = array.reshape([len(dim.units) for dim in self.dims])
        for place, dim in enumerate(self.dims):
            whole = np.compress(dim.alive(dead), whole, axis=place)
        core = whole
        for place, dim in enumerate(self.dims):
            core = core.take([0], axis=place) if dim.repeated else core
        if not (whole == core).all():
            return None
        sizes = [1] * self.rank
        for dim, size in zip(self.dims, whole.shape, strict=True):
            sizes[dim.axis] *= size
        return Core(np.array(core, order="C"), whole.shape, tuple(sizes))


def spread_of(array: Array, units: Mapping[int, Ints]) -> Spread | None:
    """Return how a constant repeats along its axes, in a way that narrowing preserves; None if it does not repeat.

    Args:
        array: its numbers, at least one.
        units: per axis the unit number of every position.
    """
    dims: list[Dim] = []
    core = array
    for axis in range(array.ndim):
        if (core == core.take([0], axis=axis)).all():  # first, so that the next loop reads less data
            core = core.take([0], axis=axis)
    for axis, size in enumerate(array.shape):
        own = units.get(axis, np.zeros(size, dtype=np.int64))
        if core.shape[axis] == 1:
            dims.append(Dim(axis, size > 1, own))
        else:
            dims += _along(core, axis, own)
    return Spread(tuple(dims), array.ndim) if any(dim.repeated for dim in dims) else None


def _along(array: Array, axis: int, units: Ints) -> list[Dim]:
    """Split an axis into repeats of a core, the core, and repeats of each of its numbers.

    The axis stays whole if its units would be spread over more than one of these.
    """
    rows = np.moveaxis(array, axis, 0).reshape(len(units), -1)
    width = rows.shape[1]
    period = next(p for p in _divisors(len(rows)) if (rows.reshape(-1, p, width) == rows[:p]).all())
    rows = rows[:period]
    run = max(r for r in _divisors(period) if (rows.reshape(-1, r, width) == rows[::r, None]).all())
    grid = units.reshape(-1, period // run, run)
    varying = [place for place in range(3) if (grid != grid.take([0], axis=place)).any()]
    if grid.shape[1] == len(units) or len(varying) > 1:
        return [Dim(axis, False, units)]
    place = varying[0] if varying else 1
    lines = [np.zeros(size, dtype=np.int64) for size in grid.shape]
    lines[place] = np.moveaxis(grid, place, 0)[:, 0, 0]
    return [Dim(axis, k != 1, line) for k, line in enumerate(lines) if k == 1 or len(line) > 1]


def _divisors(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]
