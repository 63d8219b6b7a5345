"""Round the matrices of one stage to the outputs that they should have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from onnxgrail.algebra.fit.choice import Rules
from onnxgrail.algebra.fit.refit import refit
from onnxgrail.algebra.moments.regression import Moments, error
from onnxgrail.algebra.rounding.carried import carried, factor, squared_error
from onnxgrail.algebra.rounding.grid import nearest
from onnxgrail.core import Floats, Grid, Rounded


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A rounded matrix.

    Attributes:
        rounded: its codes.
        shift: (outputs,) to be added to the bias.
        before, after: squared error of its outputs as a share of the targets' energy, rounded to nearest and as fitted.
    """

    rounded: Rounded
    shift: Floats
    before: float
    after: float


def fitted(folds: Sequence[Moments], matrices: Sequence[Floats], grids: Sequence[Grid], rules: Rules) -> list[Fit]:
    """Fit float weights to the targets, then round them with the errors carried on.

    The inputs are those of the network as rounded so far and the targets those of the network to follow, so each layer
    makes up for errors of the layers before it.  Held-out rows decide if the float weights move (`refit`).  Weights of
    one sign keep it.

    Args:
        folds: sums over rows, the outputs of all matrices side by side.
        matrices: (f, o) float weights.
        grids: the form of each.
        rules: of the fit.

    References:
        Frantar et al. 2022, GPTQ, arXiv:2210.17323; Li et al. 2025, GPTAQ, arXiv:2504.02692.
    """
    total = reduce(Moments.__add__, folds)
    best = refit(folds, [[one] for one in matrices], rules)
    gram, mean = _around(total, affine=rules.affine)
    upper = factor(gram)
    fits = []
    first = 0
    for weights, aim, grid in zip(matrices, best, grids, strict=True):
        mine = total.outputs(slice(first, first := first + weights.shape[1]))
        energy = float(mine.energy.sum()) or 1.0
        plain = nearest(weights, grid)
        rounded = carried(aim.weights, upper, grid)
        shift = aim.shift + mean @ (aim.weights - rounded.values()) if rules.affine else np.zeros(weights.shape[1])
        before, after = (_left(mine, *one) / energy for one in ((plain, np.zeros_like(shift)), (rounded, shift)))
        better = after < before and not _of_one_sign(weights)
        fits.append(Fit(rounded, shift, before, after) if better else Fit(plain, 0 * shift, before, before))
    return fits


def alone(
    folds: Sequence[Moments], matrices: Sequence[Iterable[Floats]], grids: Sequence[Grid], *, affine: bool
) -> list[Fit]:
    """Round float weights with the errors carried on, towards their own outputs: this takes less memory than `fitted`.

    Args:
        folds: sums over rows of the inputs.
        matrices: the outputs of each in parts (f, o), one after the other.
        grids: the form of each.
        affine: biases may change.
    """
    gram, mean = _around(reduce(Moments.__add__, folds), affine=affine)
    del folds
    upper = factor(gram)
    return [
        _joined([_alone(part, gram, mean, upper, grid) for part in parts])
        for parts, grid in zip(matrices, grids, strict=True)
    ]


def _alone(weights: Floats, gram: Floats, mean: Floats, upper: Floats | None, grid: Grid) -> tuple[Fit, float]:
    """Round a part of a matrix; return it with errors that are no shares, and the energy of which they would be."""
    found = []
    plain = nearest(weights, grid)
    for rounded in (plain,) if _of_one_sign(weights) else (plain, carried(weights, upper, grid)):
        off = weights - rounded.values()
        found.append((squared_error(off, gram), rounded, mean @ off))
    before = found[0][0]
    after, rounded, shift = min(found, key=lambda one: one[0])
    return Fit(rounded, 0 * shift if rounded is plain else shift, before, after), squared_error(weights, gram)


def _of_one_sign(weights: Floats) -> bool:
    """Return True for weights that are all positive or all negative, as the bands of a spectrum are.

    A logarithm or a root may follow.  Rounding to nearest keeps the sign, fits and errors carried on do not.
    """
    return bool(weights.min() >= 0 or weights.max() <= 0)


def _joined(parts: Sequence[tuple[Fit, float]]) -> Fit:
    """Return the fit of a matrix from those of parts of its outputs."""
    fits, energy = [fit for fit, _ in parts], sum(energy for _, energy in parts) or 1.0
    codes, scale, zero = (
        np.concatenate([getattr(fit.rounded, name) for fit in fits], axis=1) for name in ("codes", "scale", "zero")
    )
    before, after = (sum(getattr(fit, name) for fit in fits) / energy for name in ("before", "after"))
    shift = np.concatenate([fit.shift for fit in fits])
    return Fit(Rounded(codes, scale, zero, fits[0].rounded.grid), shift, before, after)


def _around(total: Moments, *, affine: bool) -> tuple[Floats, Floats]:
    """Return the second moments of the inputs and their mean, to which a bias that may change adapts."""
    gram, sums = total.gram[:-1, :-1], total.gram[-1, :-1].astype(np.float64)
    mean = sums / max(total.count, 1)
    if not affine:
        return gram, mean
    around = np.outer(mean, sums)
    return np.subtract(gram, around, out=around), mean


def _left(sums: Moments, rounded: Rounded, shift: Floats) -> float:
    return error(sums, np.concatenate([rounded.values(), shift[None]]))
