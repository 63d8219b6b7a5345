"""Fit a consumer's weights to the outputs it should have, on rows of two networks run side by side.

Regressors z are what the consumer reads in the narrowed network; targets t are what the dense network puts out at that
point, less the residual that the narrowed network already carries there.  So a fit corrects the errors made upstream
and not only its own narrowing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.solve import ridge_solver
from onnxgrail.core import Array, Floats

ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MARGIN = 1e-3


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

    def __sub__(self, other: Moments) -> Moments:
        """Without rows that are in it."""
        gram, cross, energy = self.gram - other.gram, self.cross - other.cross, self.energy - other.energy
        return Moments(gram, cross, energy, self.count - other.count)

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
    folds: Sequence[Moments],
    layers: Sequence[Sequence[Floats]],
    *,
    affine: bool,
    judges: int = 1,
    margin: float = MARGIN,
    alphas: Sequence[float] = ALPHAS,
) -> list[Fitted]:
    """The weights w that minimise |y - wT [z, 1]|^2 + lambda |w - w0|^2, with strength, blend and start by validation.

    y = b t + (1 - b) w0T z blends the target, which also repairs what went wrong upstream, with what the start makes of
    the same rows: the solution goes the share b of the way from the start.  The ridge pulls towards the start and not
    towards zero; the constant is not penalised.  Held-out rows choose, for each layer, start, ridge and the exact best
    b; the choice is solved again on all rows.  The first start stays where nothing beats it.

    Args:
        folds: sums over disjoint sets of rows, the outputs of all layers side by side.
        layers: per layer the (f, o) weights to begin from, the first is the fallback.
        affine: whether biases may move; otherwise shifts are zero.
        judges: how many of the folds, from the last, are held out in turn while the others are fitted.
        margin: share of the held-out error that a choice must win to be taken.
        alphas: ridges to try, as shares of the mean second moment of z.

    References:
        Li et al. 2025, GPTAQ, arXiv:2504.02692 (asymmetric targets); Frantar and Alistarh 2022, OBC, arXiv:2208.11580
        (the same solution as removing one by one, for one network).
    """
    total = functools.reduce(Moments.__add__, folds)
    trials = [(total - held, held) for held in folds[-judges:]]
    choices = []
    first = 0
    for starts in layers:
        part = slice(first, first := first + starts[0].shape[1])
        choices.append(_Choice.among(starts, [(fit.outputs(part), held.outputs(part)) for fit, held in trials], margin))
    for alpha in alphas if total.count else ():
        solvers = [_solver(fit, alpha, affine=affine) for fit, _ in trials]
        for choice in choices:
            choice.consider(alpha, solvers)
    final = {a: _solver(total, a, affine=affine) for a in {c.alpha for c in choices if c.blend and c.alpha}}
    return [choice.settled(final) for choice in choices]


Solver = Callable[[Moments, Floats], Floats]


@dataclass(kw_only=True, slots=True, eq=False)
class _Choice:
    """The best found so far for one layer, which is judged on held-out rows."""

    trials: Sequence[tuple[Moments, Moments]]
    margin: float
    start: Floats
    before: float
    begin: float
    best: float
    alpha: float | None
    blend: float = 0.0

    @classmethod
    def among(cls, starts: Sequence[Floats], trials: Sequence[tuple[Moments, Moments]], margin: float) -> _Choice:
        """The best of the starts."""
        begin = [np.concatenate([s, np.zeros((1, s.shape[1]))]) for s in starts]
        gaps = [sum(error(held, w) for _, held in trials) for w in begin]
        place = int(np.argmin(gaps)) if min(gaps) < gaps[0] * (1.0 - margin) else 0
        gap, alpha = gaps[place], np.inf if place else None
        return cls(trials=trials, margin=margin, start=begin[place], before=gaps[0], begin=gap, best=gap, alpha=alpha)

    def consider(self, alpha: float, solvers: Sequence[Solver]) -> None:
        """Take a step if some share of it does better on held-out rows, where the error is a parabola in that share.

        Where several folds are held out in turn, each must gain.
        """
        slopes, curves = np.zeros((2, len(self.trials)))
        for number, ((fit, held), solver) in enumerate(zip(self.trials, solvers, strict=True)):
            step = solver(fit, self.start)
            slopes[number] = np.einsum("fo,fo->", step, held.cross - held.gram @ self.start)
            curves[number] = np.einsum("fo,fo->", step, held.gram @ step)
        share = min(max(slopes.sum() / curves.sum(), 0.0), 1.0) if curves.any() else 0.0
        gains = 2.0 * share * slopes - share * share * curves
        gap = max(self.begin - float(gains.sum()), 0.0)
        if gap < self.best * (1.0 - self.margin) and (gains > 0.0).all():
            self.best, self.alpha, self.blend = gap, alpha, float(share)

    def settled(self, solvers: Mapping[float, Solver]) -> Fitted:
        """The choice, solved on all rows."""
        weights = self.start
        if self.blend and self.alpha:
            fit, held = self.trials[0]
            weights = weights + self.blend * solvers[self.alpha](fit + held, weights)
        energy = float(sum(held.energy.sum() for _, held in self.trials)) or 1.0
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
