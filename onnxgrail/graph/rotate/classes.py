"""Label classes of the channels of heads: which heads correspond, and where their channels are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrail.core import Ints


def units_of(sides: Sequence[Ints]) -> Ints | None:
    """Return the (channels,) units that can be picked: channels that are one in any head. None if there is only one."""
    units = np.arange(sides[0].shape[1])
    alike = {tuple(np.unique(row, return_inverse=True)[1].tolist()) for side in sides for row in side}
    for classes in sorted(alike):
        for number in range(max(classes) + 1):
            members = units[np.array(classes) == number]
            units[np.isin(units, members)] = members.min()
    found = np.unique(units, return_inverse=True)[1]
    return found if found.any() else None


def groups_of(sides: Sequence[Ints], units: Ints | None = None) -> list[Ints] | None:
    """Return the distinct heads of one or two operands, (groups, copies, channels) label classes each.

    Query heads that read the same keys are copies in one group. None if heads share some of their channels, or if the
    heads of two operands do not correspond.

    Args:
        sides: (heads, channels) label classes of each operand.
        units: (channels,) units that are picked; the channels are then sorted by unit.
    """
    if len(sides[-1]) == 1:  # all query heads share the keys
        sides = [*sides[:-1], np.tile(sides[-1], (len(sides[0]), 1))]
    if len({side.shape for side in sides}) > 1:
        return None
    if units is not None:
        sides = [side[:, np.argsort(units, kind="stable")] for side in sides]
    distinct, group = np.unique(sides[-1], axis=0, return_inverse=True)
    tables = [distinct[:, None]]
    if len(sides) > 1:
        copies = [np.unique(sides[0][group.ravel() == number], axis=0) for number in range(len(distinct))]
        if len({len(some) for some in copies}) != 1:
            return None
        tables.insert(0, np.stack(copies))
    return tables if all(_apart(table, units) for table in tables) else None


def aligned(products: Sequence[Sequence[Ints]], units: Ints | None = None) -> list[list[Ints]] | None:
    """Return the groups of several products, as `groups_of` does for one, in the order of those of the first.

    Products correspond by the heads that they have in common. None if not all of their heads do.

    Args:
        products: for each product, (heads, channels) label classes of its operands.
        units: as for `groups_of`.
    """
    found = [groups_of(sides, units) for sides in products]
    known: dict[bytes, int] = {}
    done: dict[int, list[Ints]] = {}
    while len(done) < len(found):
        ready = {k: _order(tables, known) for k, tables in enumerate(found) if tables is not None and k not in done}
        number, order = next(((k, order) for k, order in ready.items() if order is not None), (0, None))
        tables = found[number]
        if order is None or tables is None or (done and len(order) != len(done[0][0])):
            return None
        done[number] = [table[order] for table in tables]
        for table in done[number]:
            known |= {head.tobytes(): group for group, heads in enumerate(table) for head in heads}
    return [done[k] for k in range(len(found))]


def _order(tables: Sequence[Ints], known: Mapping[bytes, int]) -> list[int] | None:
    """Return the order of the groups of a product in which they are those that are known; None if they are not."""
    groups = [
        {known[head.tobytes()] for table in tables for head in table[group] if head.tobytes() in known}
        for group in range(len(tables[0]))
    ]
    if not known:
        return list(range(len(groups)))
    numbers = [next(iter(some)) if len(some) == 1 else -1 for some in groups]
    return np.argsort(numbers).tolist() if sorted(numbers) == list(range(len(numbers))) else None


def _apart(table: Ints, units: Ints | None) -> bool:
    """Return True if heads share no label classes, nor channels that are not picked together."""
    rows = table.reshape(-1, table.shape[-1])
    return len(np.unique(table)) == sum(len(row) if units is None else len(np.unique(row)) for row in rows)


def alike_inside(table: Ints, axes: Sequence[int], rows: Ints) -> bool:
    """Return True if numbers that vary along some axes are one number for all channels of any head.

    Args:
        table: label classes of the cells of a tensor.
        axes: axes of the table.
        rows: (heads, channels) label classes.
    """
    cells = np.moveaxis(table, axes, range(len(axes)))
    for alike in cells.reshape(math.prod(cells.shape[: len(axes)]), -1):
        inside = np.isin(rows, alike)
        if (inside.any(axis=1) != inside.all(axis=1)).any():
            return False
    return True


def spread(roots: Ints, table: Ints) -> Ints | None:
    """Return the positions of heads like `positions`, if several channels may have the same label class."""
    found = []
    for row in table.reshape(-1, table.shape[-1]):
        where = np.flatnonzero(np.isin(roots, row))
        if len(where) != len(row):
            return None
        first = {root: place for place, root in reversed(list(enumerate(row.tolist())))}
        found.append(where[np.argsort([first[root] for root in roots[where].tolist()], kind="stable")])
    return np.array(found).reshape(table.shape)


def positions(roots: Ints, table: Ints) -> Ints | None:
    """Return the (groups, copies, channels) positions of the label classes of heads; None if they differ in number.

    Args:
        roots: label class of every position of an axis.
        table: (groups, copies, channels) label classes.
    """
    order = np.argsort(roots, kind="stable")
    first, last = (np.searchsorted(roots[order], table, side=side) for side in ("left", "right"))
    count = int((last - first).flat[0])
    if count == 0 or (last - first != count).any():
        return None
    found = order[first[..., None] + np.arange(count)]  # (groups, copies, channels, count)
    groups, copies, channels = table.shape
    return np.asarray(np.moveaxis(found, 3, 2).reshape(groups, copies * count, channels))
