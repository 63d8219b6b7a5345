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
ENOUGH = 2  # weaker ridges in a row that gain less end the search
SOME = 64  # outputs of a layer that are looked at to choose its ridge


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
    return _error(sums, weights, sums.gram @ weights)


def _error(sums: Moments, weights: Floats, product: Floats) -> float:
    """The same, with `gram @ weights` at hand."""
    cross = np.einsum("fo,fo->", weights, sums.cross)
    quadratic = np.einsum("fo,fo->", weights, product) - 2.0 * cross
    return max(float(sums.energy.sum() + quadratic), 0.0)


def refit(
    folds: Sequence[Moments],
    layers: Sequence[Sequence[Floats]],
    *,
    affine: bool,
    judges: int = 1,
    margin: float = MARGIN,
    prior: bool = True,
    blend: bool = True,
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
        prior: the ridge pulls towards the start, otherwise towards zero.
        blend: held-out rows choose a share of the way, otherwise all of it is gone.
        alphas: ridges to try, as shares of the mean second moment of z.

    References:
        Li et al. 2025, GPTAQ, arXiv:2504.02692 (asymmetric targets); Frantar and Alistarh 2022, OBC, arXiv:2208.11580
        (the same solution as removing one by one, for one network).
    """
    trials = _trials(folds, judges)
    choices = []
    first = 0
    for starts in layers:
        part = slice(first, first := first + starts[0].shape[1])
        mine = [(fit.outputs(part), held.outputs(part)) for fit, held in trials]
        choices.append(_Choice.among(starts, mine, _Rules(margin, prior, blend)))
    for alpha in alphas if sum(fold.count for fold in folds) else ():
        searching = [choice for choice in choices if choice.worse < ENOUGH]
        solvers = [_solver(fit, alpha, affine=affine) for fit, _ in trials if searching]
        for choice in searching:
            choice.try_some(alpha, solvers)
    for alpha in sorted({c.promising for c in choices if c.promising}, reverse=True):
        solvers = [_solver(fit, alpha, affine=affine) for fit, _ in trials]
        for choice in choices:
            choice.consider(alpha, solvers)
    wanted = {c.alpha for c in choices if c.blend and c.alpha}
    total = trials[0][0] + trials[0][1] if wanted else trials[0][0]
    final = {a: _solver(total, a, affine=affine) for a in wanted}
    return [choice.settled(final) for choice in choices]


def _trials(folds: Sequence[Moments], judges: int) -> list[tuple[Moments, Moments]]:
    """Rows that are fitted and rows that judge: each of the last folds against all others."""
    if judges == 1 and len(folds) == 2:
        return [(folds[0], folds[1])]
    total = functools.reduce(Moments.__add__, folds)
    return [(total - held, held) for held in folds[-judges:]]


Solver = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class _Rules:
    """As the arguments of `refit`."""

    margin: float
    prior: bool
    blend: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """Rows that are fitted and rows that judge, for one layer.

    Attributes:
        fit, held: sums over either.
        todo: what the centre of the ridge leaves of the targets of the fitted rows; all: of both together.
        open: what the start leaves of the targets of the rows that judge.
    """

    fit: Moments
    held: Moments
    todo: Floats
    all: Floats
    open: Floats

    @classmethod
    def of(cls, fit: Moments, held: Moments, start: Floats, product: Floats, *, prior: bool) -> _Trial:
        """The products with both Gram matrices, made once for all ridges; that of `held` is given."""
        rest = held.cross - product
        if not prior:
            return cls(fit, held, fit.cross, fit.cross + held.cross, rest)
        todo = fit.cross - fit.gram @ start
        return cls(fit, held, todo, todo + rest, rest)


@dataclass(kw_only=True, slots=True, eq=False)
class _Choice:
    """The best found so far for one layer, which is judged on held-out rows."""

    trials: Sequence[_Trial]
    rules: _Rules
    start: Floats
    before: float
    begin: float
    best: float
    alpha: float | None
    blend: float = 0.0
    promising: float = 0.0
    promise: float = 0.0
    worse: int = 0

    @classmethod
    def among(cls, starts: Sequence[Floats], trials: Sequence[tuple[Moments, Moments]], rules: _Rules) -> _Choice:
        """The best of the starts."""
        begin = [np.concatenate([s, np.zeros((1, s.shape[1]))]) for s in starts]
        products = [[held.gram @ w for _, held in trials] for w in begin]
        gaps = [
            sum(_error(held, w, p) for (_, held), p in zip(trials, some, strict=True))
            for w, some in zip(begin, products, strict=True)
        ]
        place = int(np.argmin(gaps)) if min(gaps) < gaps[0] * (1.0 - rules.margin) else 0
        gap, alpha = gaps[place], np.inf if place else None
        start = begin[place]
        mine = [
            _Trial.of(fit, held, start, product, prior=rules.prior)
            for (fit, held), product in zip(trials, products[place], strict=True)
        ]
        return cls(trials=mine, rules=rules, start=start, before=gaps[0], begin=gap, best=gap, alpha=alpha)

    def try_some(self, alpha: float, solvers: Sequence[Solver]) -> None:
        """Note the ridge that gains most for a few outputs: a strength that suits them suits them all.

        After a good one the gain falls with every further step; `worse` counts them.
        """
        outputs = self.start.shape[1]
        some = slice(None, None, -(-outputs // SOME))
        _, gains = self._gains(solvers, some)
        if gains.sum() > self.promise and (gains > 0.0).all():
            self.promise, self.promising, self.worse = float(gains.sum()), alpha, 0
        elif self.promising:
            self.worse += 1

    def consider(self, alpha: float, solvers: Sequence[Solver]) -> None:
        """Take a step if some share of it does better on held-out rows; where folds take turns, on each of them."""
        if alpha != self.promising:
            return
        share, gains = self._gains(solvers, slice(None))
        gap = max(self.begin - float(gains.sum()), 0.0)
        if gap < self.best * (1.0 - self.rules.margin) and (gains > 0.0).all():
            self.best, self.alpha, self.blend = gap, alpha, share

    def _gains(self, solvers: Sequence[Solver], some: slice) -> tuple[float, Floats]:
        """The best share of a step, and what it takes off the held-out error of each trial, a parabola in the share."""
        slopes, curves = np.zeros((2, len(self.trials)))
        for number, (trial, solver) in enumerate(zip(self.trials, solvers, strict=True)):
            step = self._step(solver, trial.todo, some)
            slopes[number] = np.einsum("fo,fo->", step, trial.open[:, some])
            curves[number] = np.einsum("fo,fo->", step, trial.held.gram @ step)
        share = min(max(slopes.sum() / curves.sum(), 0.0), 1.0) if curves.any() else 0.0
        share = float(share) if self.rules.blend else 1.0
        return share, 2.0 * share * slopes - share * share * curves

    def _step(self, solver: Solver, todo: Floats, some: slice = slice(None)) -> Floats:
        """From the start to the ridge solution, which lies around the start or around zero, for some outputs."""
        found = solver(todo[:, some])
        return found if self.rules.prior else found - self.start[:, some]

    def settled(self, solvers: Mapping[float, Solver]) -> Fitted:
        """The choice, solved on all rows."""
        weights = self.start
        if self.blend and self.alpha:
            weights = weights + self.blend * self._step(solvers[self.alpha], self.trials[0].all)
        energy = float(sum(trial.held.energy.sum() for trial in self.trials)) or 1.0
        return Fitted(
            weights=weights[:-1],
            shift=weights[-1],
            alpha=self.alpha,
            blend=self.blend,
            before=self.before / energy,
            after=self.best / energy,
        )


def _solver(sums: Moments, alpha: float, *, affine: bool) -> Solver:
    """From what the centre of the ridge leaves of the targets to the way from there, (f + 1, o); factorised once."""
    size = len(sums.gram) if affine else len(sums.gram) - 1
    diagonal = np.full(size, alpha * float(np.trace(sums.gram[:-1, :-1])) / max(len(sums.gram) - 1, 1))
    if affine:
        diagonal[-1] = 1e-9 * max(float(sums.gram[-1, -1]), 1.0)  # the constant is free, up to rounding
    inverse = ridge_solver(sums.gram[:size, :size], diagonal)

    def solve(todo: Floats) -> Floats:
        step = np.zeros_like(todo)
        step[:size] = inverse(todo[:size])
        return step

    return solve
