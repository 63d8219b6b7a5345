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

ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
BLENDS = (1.0, 0.5, 0.25)
MARGIN = 1e-3  # share of the held-out error that a fit must win to be taken


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over rows of z with a constant one behind it, (f + 1,), and of targets t, (o,).

    Attributes:
        gram: sum z zT (f + 1, f + 1).
        cross: sum z tT (f + 1, o), t being what pulls the narrowed network back to the dense one.
        energy: sum t * t (o,).
        count: rows.
        near: sum z sT (f + 1, o), s being what the full layer makes of the narrowed network's input; None if unknown.
    """

    gram: Floats
    cross: Floats
    energy: Floats
    count: int
    near: Floats | None = None

    def __add__(self, other: Moments) -> Moments:
        """Both row sets together."""
        near = self.near + other.near if self.near is not None and other.near is not None else None
        energy, count = self.energy + other.energy, self.count + other.count
        return Moments(self.gram + other.gram, self.cross + other.cross, energy, count, near)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """What a fit gave.

    Attributes:
        weights: (f, o).
        shift: (o,) to be added to the bias.
        alpha: the ridge that held-out rows chose, infinite for a start as it is; None where the first start stays.
        blend: share of the far target in what was fitted.
        before: squared error on held-out rows as a share of the targets' energy, at the first start.
        after: the same, now.
    """

    weights: Floats
    shift: Floats
    alpha: float | None
    blend: float
    before: float
    after: float


def zero_moments(features: int, outputs: int, *, near: bool = False) -> Moments:
    """No rows at all."""
    cross = np.zeros((features + 1, outputs))
    return Moments(np.zeros((features + 1,) * 2), cross, np.zeros(outputs), 0, np.zeros_like(cross) if near else None)


def moments(z: Array, t: Array, near: Array | None = None) -> Moments:
    """Sums over rows of z (n, f), t (n, o) and the near target (n, o), in float64."""
    wide = np.concatenate([z, np.ones((len(z), 1), dtype=z.dtype)], axis=1)

    def times(other: Array) -> Floats:
        return np.asarray(wide.T @ other, dtype=np.float64)

    energy = np.einsum("no,no->o", t, t, dtype=np.float64)
    return Moments(times(wide), times(t), energy, len(z), None if near is None else times(near))


def error(sums: Moments, weights: Floats) -> float:
    """Sum of squared errors of t ~ wT [z, 1] over all rows and outputs, for w (f + 1, o); never negative."""
    quadratic = np.einsum("fo,fo->", weights, sums.gram @ weights - 2.0 * sums.cross)
    return max(float(sums.energy.sum() + quadratic), 0.0)


def refit(
    fit: Moments,
    held: Moments,
    starts: Sequence[Floats],
    *,
    affine: bool,
    alphas: Sequence[float] = ALPHAS,
    blends: Sequence[float] = BLENDS,
) -> Fitted:
    """The weights w that minimise |y - wT [z, 1]|^2 + lambda |w - w0|^2, with strength, target and start by validation.

    y = b t + (1 - b) s blends the far target t, which also repairs what went wrong upstream, with the near one s, which
    is easier to learn from few rows.  The ridge pulls towards the start w0 and not towards zero, so a strong ridge is
    the start itself; the constant is not penalised.  What predicts the far target best on held-out rows wins and is
    solved again on all rows; the first start stays where nothing beats it.

    Args:
        fit: sums over the rows that are fitted.
        held: sums over rows kept apart.
        starts: (f, o) weights to begin from, the first is the fallback.
        affine: whether the bias may move; otherwise the shift is zero.
        alphas: ridges to try, as shares of the mean second moment of z.
        blends: shares of the far target to try; without a near target there is only 1.

    References:
        Li et al. 2025, GPTAQ, arXiv:2504.02692 (asymmetric targets); Frantar and Alistarh 2022, OBC, arXiv:2208.11580
        (the same solution as removing one by one, for one network).
    """
    begin = [np.concatenate([s, np.zeros((1, s.shape[1]))]) for s in starts]
    shares = tuple(blends) if fit.near is not None else (1.0,)
    before = best = error(held, begin[0])
    chosen: tuple[int, float, float] | None = None
    for strength in (np.inf, *alphas) if fit.count else ():
        found = _solved(fit, begin, float(strength), shares, affine=affine)
        for (place, share), weights in found.items():
            gap = error(held, weights)
            if gap < best * (1.0 - MARGIN):
                best, chosen = gap, (place, share, float(strength))
    weights = begin[0]
    if chosen is not None:
        place, share, strength = chosen
        weights = _solved(fit + held, [begin[place]], strength, (share,), affine=affine)[0, share]
    energy = float(held.energy.sum()) or 1.0
    return Fitted(
        weights=weights[:-1],
        shift=weights[-1],
        alpha=None if chosen is None else chosen[2],
        blend=1.0 if chosen is None else chosen[1],
        before=before / energy,
        after=best / energy,
    )


def _solved(
    sums: Moments, starts: Sequence[Floats], alpha: float, blends: Sequence[float], *, affine: bool
) -> dict[tuple[int, float], Floats]:
    """(start number, blend) -> ridge solution around that start, (f + 1, o); all share one factorisation."""
    if np.isinf(alpha):
        return {(number, blends[0]): start for number, start in enumerate(starts)}
    size = len(sums.gram) if affine else len(sums.gram) - 1
    gram = sums.gram[:size, :size]
    penalty = np.full(size, alpha * float(np.trace(sums.gram[:-1, :-1])) / max(len(sums.gram) - 1, 1))
    if affine:
        penalty[-1] = 1e-9 * max(float(gram[-1, -1]), 1.0)  # the constant is free, up to rounding
    keys = [(number, share) for number in range(len(starts)) for share in blends]
    targets = {share: _blended(sums, share) for share in blends}
    rest = [(targets[share] - sums.gram @ starts[number])[:size] for number, share in keys]
    steps, _ = ridge_solve(gram + np.diag(penalty), np.concatenate(rest, axis=1), 0.0)
    found = {}
    for (number, share), step in zip(keys, np.split(steps, len(keys), axis=1), strict=True):
        found[number, share] = starts[number].copy()
        found[number, share][:size] += step
    return found


def _blended(sums: Moments, share: float) -> Floats:
    return sums.cross if sums.near is None else share * sums.cross + (1.0 - share) * sums.near
