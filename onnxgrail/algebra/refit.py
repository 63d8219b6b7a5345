"""Fit a consumer's weights to the outputs it should have, on rows of two networks run side by side.

Regressors z are what the consumer reads in the narrowed network; targets t are what the dense network puts out at that
point, less the residual that the narrowed network already carries there.  So a fit corrects the errors made upstream
and not only its own narrowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.solve import ridge_solve
from onnxgrail.core import Array, Floats

ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
MARGIN = 1e-3  # share of the held-out error that a fit must win to be taken


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over rows of z with a constant one behind it, (f + 1,), and of targets t, (o,).

    Attributes:
        gram: sum z zT (f + 1, f + 1); cross: sum z tT (f + 1, o); energy: sum t * t (o,); count: rows.
    """

    gram: Floats
    cross: Floats
    energy: Floats
    count: int

    def __add__(self, other: Moments) -> Moments:
        """Both row sets together."""
        return Moments(
            self.gram + other.gram, self.cross + other.cross, self.energy + other.energy, self.count + other.count
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """What a fit gave.

    Attributes:
        weights: (f, o); shift: (o,) to be added to the bias.
        alpha: the ridge that held-out rows chose, None where the start was kept.
        before, after: squared error on held-out rows as a share of the targets' energy, at the start and now.
    """

    weights: Floats
    shift: Floats
    alpha: float | None
    before: float
    after: float


def zero_moments(features: int, outputs: int) -> Moments:
    """No rows at all."""
    return Moments(np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs)), np.zeros(outputs), 0)


def moments(z: Array, t: Array) -> Moments:
    """Sums over rows of z (n, f) and t (n, o), in float64."""
    ones = np.ones((len(z), 1), dtype=z.dtype)
    wide = np.concatenate([z, ones], axis=1)
    gram, cross = (np.asarray(wide.T @ other, dtype=np.float64) for other in (wide, t))
    return Moments(gram, cross, np.einsum("no,no->o", t, t, dtype=np.float64), len(z))


def error(sums: Moments, weights: Floats) -> float:
    """Sum of squared errors of t ~ wT [z, 1] over all rows and outputs, for w (f + 1, o); never negative."""
    quadratic = np.einsum("fo,fo->", weights, sums.gram @ weights - 2.0 * sums.cross)
    return max(float(sums.energy.sum() + quadratic), 0.0)


def refit(
    fit: Moments, held: Moments, starts: Sequence[Floats], *, affine: bool, alphas: Sequence[float] = ALPHAS
) -> Fitted:
    """The weights w that minimise |t - wT [z, 1]|^2 + lambda |w - w0|^2, strength and start chosen on held-out rows.

    The ridge pulls towards the start w0 and not towards zero, so a strong ridge is the start itself and a fit on few
    rows cannot do much harm; the constant is not penalised.  The winner is solved again on all rows, and the first
    start stays where no fit beats it on held-out rows.

    Args:
        fit: sums over the rows that are fitted.
        held: sums over rows kept apart.
        starts: (f, o) weights to begin from, the first is the fallback.
        affine: whether the bias may move; otherwise the shift is zero.
        alphas: ridges to try, as shares of the mean second moment of z.

    References:
        algorithms g.1 (ridge to prior), g.2 (affine), g.9 (strength by validation); Tang et al. 2026 for the rest.
    """
    outputs = fit.cross.shape[1]
    begin = [np.concatenate([s, np.zeros((1, outputs))]) for s in starts]
    before = best = error(held, begin[0])
    chosen: tuple[Floats, float] | None = None
    for start in begin:
        for strength in (np.inf, *alphas) if fit.count else ():
            found = start if np.isinf(strength) else _solved(fit, start, strength, affine=affine)
            gap = error(held, found)
            if gap < best * (1.0 - MARGIN):
                best, chosen = gap, (start, float(strength))
    weights = begin[0]
    if chosen is not None:
        start, strength = chosen
        weights = start if np.isinf(strength) else _solved(fit + held, start, strength, affine=affine)
    energy = float(held.energy.sum()) or 1.0
    return Fitted(
        weights=weights[:-1],
        shift=weights[-1],
        alpha=None if chosen is None else chosen[1],
        before=before / energy,
        after=best / energy,
    )


def _solved(sums: Moments, start: Floats, alpha: float, *, affine: bool) -> Floats:
    """The ridge solution around a start, (f + 1, o)."""
    gram, cross = sums.gram, sums.cross - sums.gram @ start
    if not affine:
        gram, cross = gram[:-1, :-1], cross[:-1]
    features = len(start) - 1
    scale = float(np.trace(sums.gram[:-1, :-1])) / max(features, 1)
    lam = alpha * scale
    penalty = np.full(len(gram), lam)
    if affine:
        penalty[-1] = 1e-9 * max(float(gram[-1, -1]), 1.0)  # the constant is free, up to rounding
    step, _ = ridge_solve(gram + np.diag(penalty), cross, 0.0)
    if not affine:
        step = np.concatenate([step, np.zeros((1, step.shape[1]))])
    return start + step
