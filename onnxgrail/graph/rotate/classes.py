"""Label classes of the channels of heads: which heads correspond, and where their channels are."""

from __future__ import annotations

from collections.abc import Sequence

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


def _apart(table: Ints, units: Ints | None) -> bool:
    """Return True if heads share no label classes, nor channels that are not picked together."""
    rows = table.reshape(-1, table.shape[-1])
    return len(np.unique(table)) == sum(len(row) if units is None else len(np.unique(row)) for row in rows)


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
