"""Remove units one at a time, always the one whose loss is smallest after all others were refitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from onnxgrail.algebra.quadratic import Quadratic, quadratics
from onnxgrail.algebra.remaining import Remaining
from onnxgrail.algebra.solve import GROWTHS
from onnxgrail.core import Floats, Ints, View
from onnxgrail.errors import DataError

PANEL = 128  # features whose removal is written into the matrices at once
TIE = 1e-9  # losses that differ by less than this share are equal, so that rounding decides nothing
ALPHA = 1e-3  # the ridge, as a share of the mean second moment

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Elimination:
    """A path from all units down to `keep`.

    Attributes:
        order: units as they were removed, first the one missed least.
        kept: (keep,) units that were never removed, ascending.
        loss: (u + 1,) squared output error of the block's consumers, summed over calibration rows, when the k units
            removed last are kept and their weights are refitted with the ridge: `loss[u]` is 0, `loss[0]` the squared
            output itself.  NaN below `keep`.  It never rises with k, and bounds the error without ridge from above.
        energy: `loss[0]`, known even if the path stops earlier.
    """

    order: Ints
    kept: Ints
    loss: Floats
    energy: float

    @property
    def relative(self) -> Floats:
        """(u + 1,) share of the squared output that is lost, from 0 to 1: comparable between blocks."""
        return self.loss / self.energy if self.energy > 0.0 else self.loss

    def best(self, count: int) -> Ints:
        """The `count` units that stay longest, ascending; `count` is at least `len(kept)`."""
        late = self.order[len(self.order) - (count - len(self.kept)) :]
        return np.sort(np.concatenate([self.kept, late]))


def elimination(view: View, *, alpha: float = ALPHA, keep: int = 0) -> Elimination:
    """Greedy backward elimination with the exact loss of every candidate at every step.

    Removing unit g with features g from consumers C costs tr(C_gᵀ (A⁻¹_gg)⁻¹ C_g) once everything left is refitted, by
    C ← C − A⁻¹_·g (A⁻¹_gg)⁻¹ C_g and A⁻¹ ← A⁻¹ − A⁻¹_·g (A⁻¹_gg)⁻¹ A⁻¹_g·.  Only A⁻¹ and M = C Cᵀ are held: the loss
    reads no more than their diagonal blocks, which are kept up to date, while full updates wait until a panel of them
    becomes one matrix product.  Several probes add their losses.  Ties go to the unit of higher index, so that the
    lower one stays.

    Args:
        view: the block with its second moments.
        alpha: ridge as a share of the mean second moment, α > 0.
        keep: stop when so many units are left.

    Raises:
        UsageError: if the view carries no second moments.

    References:
        Hassibi and Stork 1993, Second order derivatives for network pruning: Optimal Brain Surgeon, NeurIPS; in
        groups, Kurtic et al. 2023, ZipLM, NeurIPS, arXiv:2302.04089.
    """
    return steadied(view, alpha, lambda problems: _eliminated(view.block.units, problems, keep))


def steadied(view: View, alpha: float, run: Callable[[list[Quadratic]], T]) -> T:
    """`run` on the block's problems, with a tenfold ridge wherever rounding has left them indefinite.

    Raises:
        UsageError: if the view carries no second moments.
        DataError: if no ridge helps, because they hold NaN or infinity.
    """
    for growth in range(GROWTHS + 1):
        try:
            return run(quadratics(view, alpha * 10.0**growth))
        except np.linalg.LinAlgError:
            continue
    raise DataError(f"second moments of block {view.block.name!r} have no inverse", hint="Check the calibration data.")


def _eliminated(units: int, problems: list[Quadratic], keep: int) -> Elimination:
    """The path for given problems."""
    if not problems:  # nothing ever arrived: all are equally worthless
        gone = np.arange(keep, units)[::-1]
        return Elimination(order=gone, kept=np.arange(keep), loss=np.zeros(units + 1), energy=0.0)
    parts = [Remaining(problem) for problem in problems]
    size = max(1, PANEL // max(problem.members for problem in problems))
    order: list[int] = []
    costs: list[float] = []
    alive = np.arange(units)
    while len(alive) > keep:
        picks, panel = _panel(parts, min(size, len(alive) - keep))
        order.extend(alive[picks])
        costs.extend(panel)
        alive = np.delete(alive, picks)
    loss = np.full(units + 1, np.nan)
    loss[keep:] = np.cumsum([0.0, *costs])[::-1]
    energy = sum(part.energy for part in parts)
    return Elimination(order=np.array(order, np.int64), kept=alive, loss=loss, energy=energy)


def _panel(parts: list[Remaining], count: int) -> tuple[list[int], list[float]]:
    """Remove `count` units one by one: their positions among those alive before, and what each cost."""
    for part in parts:
        part.open(count)
    picks: list[int] = []
    costs: list[float] = []
    for _ in range(count):
        cost = np.sum([part.costs() for part in parts], axis=0)
        cost[picks] = np.inf
        low = cost.min()
        pick = int(np.flatnonzero(cost <= low * (1.0 + TIE))[-1])
        picks.append(pick)
        costs.append(float(low))
        for part in parts:
            part.remove(pick)
    for part in parts:
        part.close(picks)
    return picks, costs
