"""Fit a consumer's weights to the outputs it should have, on rows of two networks run side by side.

Regressors z are what the consumer reads in the narrowed network; targets t are what the dense network puts out at that
point, less the residual that the narrowed network already carries there.  So a fit corrects the errors made upstream
and not only its own narrowing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.solve import ridge_solver
from onnxgrail.core import Array, Floats

ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MARGIN = 1e-3  # share of the held-out error that a fit must win to be taken


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over rows of z with a constant one behind it, (f + 1,), and of targets t, (o,).

    Attributes:
        gram: sum z zT (f + 1, f + 1).
        cross: sum z tT (f + 1, o).
        energy: sum t * t (o,).
        count: rows.
    """

    gram: Floats
    cross: Floats
    energy: Floats
    count: int

    def __add__(self, other: Moments) -> Moments:
        """Both row sets together."""
        gram, cross, energy = self.gram + other.gram, self.cross + other.cross, self.energy + other.energy
        return Moments(gram, cross, energy, self.count + other.count)

    def outputs(self, some: slice) -> Moments:
        """The same for some of the outputs."""
        return Moments(self.gram, self.cross[:, some], self.energy[some], self.count)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """What a fit gave.

    Attributes:
        weights: (f, o).
        shift: (o,) to be added to the bias.
        alpha: the ridge that held-out rows chose, infinite for a start as it is; None where the first start stays.
        blend: share of the way from the start to the ridge solution.
        before: squared error on held-out rows as a share of the targets' energy, at the first start.
        after: the same, now.
    """

    weights: Floats
    shift: Floats
    alpha: float | None
    blend: float
    before: float
    after: float


def zero_moments(features: int, outputs: int) -> Moments:
    """No rows at all."""
    return Moments(np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs)), np.zeros(outputs), 0)


def moments(z: Array, t: Array) -> Moments:
    """Sums over rows of z (n, f) and t (n, o): products in their own precision, sums in float64."""
    wide = np.concatenate([z, np.ones((len(z), 1), dtype=z.dtype)], axis=1)
    gram, cross = (np.asarray(wide.T @ other, dtype=np.float64) for other in (wide, t))
    return Moments(gram, cross, np.einsum("no,no->o", t, t, dtype=np.float64), len(z))


def error(sums: Moments, weights: Floats) -> float:
    """Sum of squared errors of t ~ wT [z, 1] over all rows and outputs, for w (f + 1, o); never negative."""
    quadratic = np.einsum("fo,fo->", weights, sums.gram @ weights - 2.0 * sums.cross)
    return max(float(sums.energy.sum() + quadratic), 0.0)


def refit(
    fit: Moments, held: Moments, layers: Sequence[Sequence[Floats]], *, affine: bool, alphas: Sequence[float] = ALPHAS
) -> list[Fitted]:
    """The weights w that minimise |y - wT [z, 1]|^2 + lambda |w - w0|^2, with strength, blend and start by validation.

    y = b t + (1 - b) w0T z blends the target, which also repairs what went wrong upstream, with what the start makes of
    the same rows: the solution goes the share b of the way from the start.  The ridge pulls towards the start and not
    towards zero; the constant is not penalised.  Held-out rows choose, for each layer, start, ridge and the exact best
    b; the choice is solved again on all rows.  The first start stays where nothing beats it.

    Args:
        fit: sums over the rows that are fitted, the outputs of all layers side by side.
        held: sums over rows kept apart.
        layers: per layer the (f, o) weights to begin from, the first is the fallback.
        affine: whether biases may move; otherwise shifts are zero.
        alphas: ridges to try, as shares of the mean second moment of z.

    References:
        Li et al. 2025, GPTAQ, arXiv:2504.02692 (asymmetric targets); Frantar and Alistarh 2022, OBC, arXiv:2208.11580
        (the same solution as removing one by one, for one network).
    """
    choices = []
    first = 0
    for starts in layers:
        part = slice(first, first := first + starts[0].shape[1])
        choices.append(_Choice.among(starts, fit.outputs(part), held.outputs(part)))
    for alpha in alphas if fit.count else ():
        solve = _solver(fit, alpha, affine=affine)
        for choice in choices:
            choice.consider(alpha, solve(choice.fit, choice.start))
    both = fit + held
    solvers = {a: _solver(both, a, affine=affine) for a in {c.alpha for c in choices if c.blend and c.alpha}}
    return [choice.settled(solvers) for choice in choices]


Solver = Callable[[Moments, Floats], Floats]


@dataclass(kw_only=True, slots=True, eq=False)
class _Choice:
    """The best found so far for one layer."""

    fit: Moments
    held: Moments
    start: Floats
    before: float
    begin: float
    best: float
    alpha: float | None
    blend: float = 0.0

    @classmethod
    def among(cls, starts: Sequence[Floats], fit: Moments, held: Moments) -> _Choice:
        """The best of the starts."""
        begin = [np.concatenate([s, np.zeros((1, s.shape[1]))]) for s in starts]
        gaps = [error(held, w) for w in begin]
        place = int(np.argmin(gaps)) if min(gaps) < gaps[0] * (1.0 - MARGIN) else 0
        gap, alpha = gaps[place], np.inf if place else None
        return cls(fit=fit, held=held, start=begin[place], before=gaps[0], begin=gap, best=gap, alpha=alpha)

    def consider(self, alpha: float, step: Floats) -> None:
        """Take a step if some share of it does better on held-out rows, where the error is a parabola in that share."""
        slope = float(np.einsum("fo,fo->", step, self.held.cross - self.held.gram @ self.start))
        curve = float(np.einsum("fo,fo->", step, self.held.gram @ step))
        share = min(max(slope / curve, 0.0), 1.0) if curve > 0.0 else 0.0
        gap = max(self.begin - 2.0 * share * slope + share * share * curve, 0.0)
        if gap < self.best * (1.0 - MARGIN):
            self.best, self.alpha, self.blend = gap, alpha, share

    def settled(self, solvers: Mapping[float, Solver]) -> Fitted:
        """The choice, solved on all rows."""
        weights = self.start
        if self.blend and self.alpha:
            weights = weights + self.blend * solvers[self.alpha](self.fit + self.held, weights)
        energy = float(self.held.energy.sum()) or 1.0
        return Fitted(
            weights=weights[:-1],
            shift=weights[-1],
            alpha=self.alpha,
            blend=self.blend,
            before=self.before / energy,
            after=self.best / energy,
        )


def _solver(sums: Moments, alpha: float, *, affine: bool) -> Solver:
    """From sums and a start to the step that leads to the ridge solution around it, (f + 1, o); factorised once."""
    size = len(sums.gram) if affine else len(sums.gram) - 1
    penalty = np.full(size, alpha * float(np.trace(sums.gram[:-1, :-1])) / max(len(sums.gram) - 1, 1))
    if affine:
        penalty[-1] = 1e-9 * max(float(sums.gram[-1, -1]), 1.0)  # the constant is free, up to rounding
    inverse = ridge_solver(sums.gram[:size, :size] + np.diag(penalty))

    def solve(part: Moments, start: Floats) -> Floats:
        step = np.zeros_like(start)
        step[:size] = inverse((part.cross - part.gram @ start)[:size])
        return step

    return solve
