"""Greedy backward elimination: removes the unit whose loss, after a refit of all others, is smallest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TypeVar

import numpy as np

from onnxgrail.algebra.select.quadratic import Quadratic, quadratics
from onnxgrail.algebra.select.remaining import Remaining
from onnxgrail.algebra.solve.ridge import GROWTHS
from onnxgrail.core import Floats, Ints, View
from onnxgrail.errors import DataError

PANEL = 128  # features whose removal is applied to the matrices at once
TIE = 1e-9  # losses that differ by less than this share count as equal, so that rounding decides nothing
ALPHA = 1e-3  # the ridge, as a share of the mean second moment

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Elimination:
    """A path from all units down to `keep`.

    Attributes:
        order: units as they were removed, the least important first.
        kept: (keep,) units that were never removed, ascending.
        loss: (u + 1,) squared output error of the block's consumers, summed over calibration rows, if the k units
            removed last are kept and their weights are refitted with the ridge: `loss[u]` is 0, `loss[0]` the squared
            output itself. NaN below `keep`. It never rises with k, and bounds the error without ridge from above.
        energy: `loss[0]`, also set if the path stops earlier.
    """

    order: Ints
    kept: Ints
    loss: Floats
    energy: float

    def best(self, count: int) -> Ints:
        """Return the `count` units that stay longest, ascending; `count` is at least `len(kept)`."""
        late = self.order[len(self.order) - (count - len(self.kept)) :]
        return np.sort(np.concatenate([self.kept, late]))


def elimination(view: View, *, alpha: float = ALPHA, keep: int = 0) -> Elimination:
    """Eliminate units greedily, with the exact loss of every candidate at every step.

    Removing unit g with features g from consumers C costs tr(C_gᵀ (A⁻¹_gg)⁻¹ C_g) if all other weights are refitted, by
    C ← C − A⁻¹_·g (A⁻¹_gg)⁻¹ C_g and A⁻¹ ← A⁻¹ − A⁻¹_·g (A⁻¹_gg)⁻¹ A⁻¹_g·. Only A⁻¹ and M = C Cᵀ are stored: the loss
    reads only their diagonal blocks, which are kept up to date, while full updates wait until a panel of them becomes
    one matrix product. Losses of several probes are added. Ties go to the unit of higher index, so that the lower one
    stays.

    Args:
        view: the block with its second moments.
        alpha: ridge parameter as a share of the mean second moment, α > 0.
        keep: number of units at which to stop.

    Raises:
        UsageError: the view carries no second moments.

    References:
        Hassibi and Stork 1993, Second order derivatives for network pruning: Optimal Brain Surgeon, NeurIPS; in
        groups, Kurtic et al. 2023, ZipLM, NeurIPS, arXiv:2302.04089.
    """
    return steadied(view, alpha, lambda problems: _eliminated(view.block.units, problems, keep))


def steadied(view: View, alpha: float, run: Callable[[list[Quadratic]], T]) -> T:
    """Call `run` on the block's problems; raise the ridge tenfold while rounding makes them indefinite.

    Raises:
        UsageError: the view carries no second moments.
        DataError: no ridge helps, because they hold NaN or infinity.
    """
    for growth in range(GROWTHS + 1):
        try:
            return run(quadratics(view, alpha * 10.0**growth))
        except np.linalg.LinAlgError:
            continue
    raise DataError(f"second moments of block {view.block.name!r} have no inverse", hint="Check the calibration data.")


def _eliminated(units: int, problems: list[Quadratic], keep: int) -> Elimination:
    """Compute the path for given problems."""
    if not problems:  # all activations are zero: all units are equally unimportant
        gone = np.arange(keep, units)[::-1]
        return Elimination(order=gone, kept=np.arange(keep), loss=np.zeros(units + 1), energy=0.0)
    order, costs, energy = removals(units, problems, keep, repeat(1))
    loss = np.full(units + 1, np.nan)
    loss[keep:] = np.cumsum([0.0, *costs])[::-1]
    return Elimination(order=order, kept=np.setdiff1d(np.arange(units), order), loss=loss, energy=energy)


def removals(
    units: int, problems: list[Quadratic], keep: int, batches: Iterator[int]
) -> tuple[Ints, list[float], float]:
    """Remove units in batches, the cheapest first, until `keep` are left.

    Args:
        units: number of units.
        problems: at least one.
        keep: number of units that stay.
        batches: number of units to remove at once, step by step; losses of the others are exact again after each step.

    Returns:
        Units in order of removal, the loss of each alone at that time, and the loss of removing all units.
    """
    parts = [Remaining(problem) for problem in problems]
    size = max(1, PANEL // max(problem.members for problem in problems))
    order: list[int] = []
    costs: list[float] = []
    alive = np.arange(units)
    batch = next(batches)
    while len(alive) > keep:
        room = min(max(size, batch), len(alive) - keep)
        for part in parts:
            part.open(room)
        gone: list[int] = []
        while len(gone) < room and len(gone) + batch <= max(size, batch):
            cost = np.sum([part.costs() for part in parts], axis=0)
            cost[gone] = np.inf
            picks = _cheapest(cost, min(batch, room - len(gone)))
            gone.extend(picks)
            costs.extend(cost[picks])
            for part in parts:
                part.remove(picks)
            batch = next(batches)
        for part in parts:
            part.close(gone)
        order.extend(alive[gone])
        alive = np.delete(alive, gone)
    return np.array(order, np.int64), costs, sum(part.energy for part in parts)


def _cheapest(cost: Floats, count: int) -> Ints:
    """Return the positions of the lowest costs, cheapest first; of equal costs the last position first."""
    if count == 1:
        low = cost.min()
        return np.flatnonzero(cost <= low * (1.0 + TIE))[-1:]
    backwards = np.argsort(cost[::-1], kind="stable")[:count]
    return np.asarray(len(cost) - 1 - backwards)
