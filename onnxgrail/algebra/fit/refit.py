"""Fits a consumer's weights to the dense network's outputs, on rows of two networks run side by side.

Regressors z are the consumer's inputs in the narrowed network. Targets t are the dense network's outputs at that point,
less the residual that the narrowed network adds there. So a fit corrects upstream errors as well as its own narrowing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxgrail.algebra.moments.few_rows import span
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.algebra.solve.ridge import ridge_solver
from onnxgrail.core import Array, Floats

ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MARGIN = 1e-3
WORTH = 1e-4  # relative decrease of the held-out error that a weaker ridge needs
ENOUGH = 2  # weaker ridges in a row without a decrease that end the search
SOME = 64  # outputs of a layer that are used to search its ridge


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over rows of z with an appended constant 1, (f + 1,), and of targets t, (o,).

    Attributes:
        gram: sum z zT (f + 1, f + 1).
        cross: sum z tT (f + 1, o).
        energy: sum t * t (o,).
        count: number of rows.
    """

    gram: Floats
    cross: Floats
    energy: Floats
    count: int

    def __add__(self, other: Moments) -> Moments:
        """Return the sums over both sets of rows."""
        gram, cross, energy = self.gram + other.gram, self.cross + other.cross, self.energy + other.energy
        return Moments(gram, cross, energy, self.count + other.count)

    def within(self, basis: Floats) -> Moments:
        """Return the moments in the coordinates of an orthonormal basis (f, r) of z: Bᵀ z and the constant."""
        side = linear().product(self.gram[:, :-1], basis)
        gram = np.concatenate([basis.T @ side[:-1], side[-1:]])
        gram = np.concatenate([gram, np.append(side[-1], self.gram[-1, -1])[:, None]], axis=1)
        cross = np.concatenate([linear().product(basis.T, self.cross[:-1]), self.cross[-1:]])
        return Moments(gram, cross, self.energy, self.count)

    def outputs(self, some: slice) -> Moments:
        """Return the moments of a slice of the outputs."""
        return Moments(self.gram, self.cross[:, some], self.energy[some], self.count)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """The result of a fit.

    Attributes:
        weights: (f, o).
        shift: (o,) to be added to the bias.
        start: index of the starting weights.
        alpha: the ridge that held-out rows chose; infinite for a start without a step; None if the first start stays.
        blend: length of the step from the start to the ridge solution, from 0 to 1.
        before: squared error on held-out rows as a share of the targets' energy, at the first start.
        after: the same for the fitted weights.
    """

    weights: Floats
    shift: Floats
    start: int = 0
    alpha: float | None
    blend: float
    before: float
    after: float


def zero_moments(features: int, outputs: int) -> Moments:
    """Return the moments of zero rows."""
    return Moments(np.zeros((features + 1,) * 2), np.zeros((features + 1, outputs)), np.zeros(outputs), 0)


def moments(z: Array, t: Array) -> Moments:
    """Compute sums over rows of z (n, f) and t (n, o): products in their own precision, sums in float64."""
    wide = np.concatenate([z, np.ones((len(z), 1), dtype=z.dtype)], axis=1)
    gram, cross = (np.asarray(wide.T @ other, dtype=np.float64) for other in (wide, t))
    return Moments(gram, cross, np.einsum("no,no->o", t, t, dtype=np.float64), len(z))


def error(sums: Moments, weights: Floats) -> float:
    """Compute the sum of squared errors of t ~ wT [z, 1] over rows and outputs, for w (f + 1, o); never negative."""
    return _error(sums, weights, sums.gram @ weights)


def _error(sums: Moments, weights: Floats, product: Floats) -> float:
    """Compute `error` with a given `gram @ weights`."""
    cross = np.einsum("fo,fo->", weights, sums.cross)
    quadratic = np.einsum("fo,fo->", weights, product) - 2.0 * cross
    return max(float(sums.energy.sum() + quadratic), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules of a fit: what may change, and how held-out rows choose.

    Attributes:
        affine: True if biases may change; otherwise shifts are zero.
        judges: number of folds, from the last, that are held out in turn while the others are fitted.
        margin: relative decrease of the held-out error that a choice needs.
        prior: True if the ridge pulls towards the start, otherwise it pulls towards zero.
        blend: True if held-out rows choose the step length, otherwise it is 1.
        alphas: ridge parameters to try, as shares of the mean second moment of z.
    """

    affine: bool
    judges: int = 1
    margin: float = MARGIN
    prior: bool = True
    blend: bool = True
    alphas: Sequence[float] = ALPHAS


def refit(
    folds: Sequence[Moments],
    layers: Sequence[Sequence[Floats]],
    rules: Rules,
) -> list[Fitted]:
    """Minimize |y - wT [z, 1]|^2 + lambda |w - w0|^2; validation chooses ridge, blend and start of each layer.

    y = b t + (1 - b) w0T z blends the target, which includes corrections of upstream errors, with the outputs of the
    start on the same rows: the fit takes a step of length b from the start to the ridge solution. The ridge pulls
    towards the start, not towards zero; the constant is not penalized. Held-out rows choose start and ridge, and the
    optimal b; the choice is solved again on all rows. The first start stays if nothing is better.

    Args:
        folds: sums over disjoint sets of rows, with the outputs of all layers side by side.
        layers: per layer the (f, o) weights to start from; the first is the fallback.
        rules: what may change, and how held-out rows choose.

    References:
        Li et al. 2025, GPTAQ, arXiv:2504.02692 (asymmetric targets); Frantar and Alistarh 2022, OBC, arXiv:2208.11580
        (the same solution as removing one by one, for one network).
    """
    features = len(folds[0].gram) - 1
    basis = span([fold.gram[:-1, :-1] for fold in folds], sum(fold.count for fold in folds))
    if basis is None:
        return _refit(folds, layers, features, rules)
    narrow = [[basis.T @ start for start in starts] for starts in layers]
    found = _refit([fold.within(basis) for fold in folds], narrow, features, rules)
    return [_lifted(one, starts, basis, rules) for one, starts in zip(found, layers, strict=True)]


def _lifted(found: Fitted, starts: Sequence[Floats], basis: Floats, rules: Rules) -> Fitted:
    """Map a fit in the span of the rows back to all features.

    Components orthogonal to the span keep their start values, or shrink if the ridge pulls towards zero.
    """
    start = starts[found.start]
    across = start - basis @ (basis.T @ start)
    stays = 1.0 if rules.prior else 1.0 - found.blend
    return replace(found, weights=basis @ found.weights + stays * across)


def _refit(
    folds: Sequence[Moments],
    layers: Sequence[Sequence[Floats]],
    features: int,
    rules: Rules,
) -> list[Fitted]:
    """Fit the layers; `features` counts those of the rows, of which there may be fewer in `folds`."""
    total = functools.reduce(Moments.__add__, folds)
    judging = folds[-rules.judges :]
    choices = []
    first = 0
    for starts in layers:
        part = slice(first, first := first + starts[0].shape[1])
        mine = [held.outputs(part) for held in judging]
        choices.append(_Choice.among(starts, total.outputs(part), mine, rules))
    solvers = functools.partial(_solvers, folds, total, features, rules)
    last: dict[float, Solver] = {}  # the solver of the best ridge so far, to be reused; only with one judge
    for alpha in rules.alphas if total.count else ():
        searching = [choice for choice in choices if choice.worse < ENOUGH]
        solver = _measure(searching, solvers(alpha) if searching else (), few=True)
        promises = [choice.note(alpha) for choice in searching]
        if solver and rules.judges == 1 and any(promises):
            last = {alpha: solver}
        del solver  # frees its memory before the next one is built
    for alpha in sorted({c.promising for c in choices if c.promising}, reverse=True):
        promised = [choice for choice in choices if choice.promising == alpha]
        _measure(promised, [last.pop(alpha)] if alpha in last else solvers(alpha), few=False)
        for choice in promised:
            choice.take(alpha)
    final = {a: _solver(total.gram, a, features, rules) for a in {c.alpha for c in choices if c.blend and c.alpha}}
    return [choice.settled(final) for choice in choices]


def _measure(choices: Sequence[_Choice], solvers: Iterable[Solver], *, few: bool) -> Solver | None:
    """Let choices evaluate a ridge on every held-out fold, for a few outputs or all; return the last solver."""
    solver = None
    for number, solver in enumerate(solvers):
        for choice in choices:
            choice.see(number, solver, few=few)
    return solver


def _solvers(folds: Sequence[Moments], total: Moments, features: int, rules: Rules, alpha: float) -> Iterator[Solver]:
    """Yield a solver per judge, from all rows but its own."""
    for held in folds[-rules.judges :]:
        others = [fold.gram for fold in folds if fold is not held]
        yield _solver(others[0] if len(others) == 1 else total.gram - held.gram, alpha, features, rules)


Solver = Callable[[Floats], Floats]


@dataclass(kw_only=True, slots=True, eq=False)
class _Choice:
    """The best choice so far for one layer, evaluated on held-out rows.

    Attributes:
        total, judging: sums over all rows, and over those of each judging fold.
        all, open: products of z with the residuals of the start, over all rows and per judging fold.
        slopes, curves: coefficients of each fold's held-out error, a parabola in the step length.
        promising, promise: the best ridge for a few outputs so far, and its decrease of the error.
    """

    total: Moments
    judging: Sequence[Moments]
    rules: Rules
    place: int
    start: Floats
    all: Floats
    open: Sequence[Floats]
    slopes: Floats
    curves: Floats
    before: float
    begin: float
    best: float
    alpha: float | None
    blend: float = 0.0
    promising: float = 0.0
    promise: float = 0.0
    worse: int = 0

    @classmethod
    def among(cls, starts: Sequence[Floats], total: Moments, judging: Sequence[Moments], rules: Rules) -> _Choice:
        """Choose the best of the starts."""
        first, best = np.inf, np.inf
        for number, weights in enumerate(starts):
            begin = np.concatenate([weights, np.zeros((1, weights.shape[1]))])
            products = [linear().product(held.gram, begin) for held in judging]
            gap = sum(_error(held, begin, product) for held, product in zip(judging, products, strict=True))
            first = gap if number == 0 else first
            if number == 0 or gap < min(best, first * (1.0 - rules.margin)):
                best, place, start = gap, number, begin
                rest = [held.cross - product for held, product in zip(judging, products, strict=True)]
            del products
        slopes, curves = np.zeros((2, len(judging)))
        return cls(
            total=total,
            judging=judging,
            rules=rules,
            place=place,
            start=start,
            all=total.cross - linear().product(total.gram, start),
            open=rest,
            slopes=slopes,
            curves=curves,
            before=first,
            begin=best,
            best=best,
            alpha=np.inf if place else None,
        )

    def see(self, number: int, solver: Solver, *, few: bool) -> None:
        """Evaluate on one fold a step that was fitted to the other folds."""
        some = slice(None, None, -(-self.start.shape[1] // SOME)) if few else slice(None)
        held, rest = self.judging[number], self.open[number][:, some]
        if self.rules.prior:
            step = solver(self.all[:, some] - rest)
        else:
            step = solver(self.total.cross[:, some] - held.cross[:, some]) - self.start[:, some]
        self.slopes[number] = np.einsum("fo,fo->", step, rest)
        self.curves[number] = np.einsum("fo,fo->", step, linear().product(held.gram, step))

    def _gains(self) -> tuple[float, Floats]:
        """Return the best step length, and the decrease of each fold's error at that length."""
        share = min(max(self.slopes.sum() / self.curves.sum(), 0.0), 1.0) if self.curves.any() else 0.0
        share = float(share) if self.rules.blend else 1.0
        return share, 2.0 * share * self.slopes - share * share * self.curves

    def note(self, alpha: float) -> bool:
        """Return True if a ridge gains most so far for a few outputs, which represent all outputs.

        After the best ridge the gain falls with every weaker one; `worse` counts them.
        """
        gains, every = self._gains()[1], max(self.start.shape[1], 1)
        found = float(gains.sum())
        left = self.begin * min(SOME, every) / every - self.promise  # approximate, for as many outputs
        if found > self.promise + WORTH * max(left, 0.0) and (gains > 0.0).all():
            self.promise, self.promising, self.worse = found, alpha, 0
        elif self.promising:
            self.worse += 1
        return self.promising == alpha

    def take(self, alpha: float) -> None:
        """Take the step if it lowers the held-out error enough, and, with several judges, that of each of them."""
        share, gains = self._gains()
        gap = max(self.begin - float(gains.sum()), 0.0)
        if gap < self.best * (1.0 - self.rules.margin) and (gains > 0.0).all():
            self.best, self.alpha, self.blend = gap, alpha, share

    def settled(self, solvers: Mapping[float, Solver]) -> Fitted:
        """Solve the choice on all rows."""
        weights = self.start
        if self.blend and self.alpha:
            solver = solvers[self.alpha]
            step = solver(self.all) if self.rules.prior else solver(self.total.cross) - self.start
            weights = weights + self.blend * step
        energy = float(sum(held.energy.sum() for held in self.judging)) or 1.0
        return Fitted(
            weights=weights[:-1],
            shift=weights[-1],
            start=self.place,
            alpha=self.alpha,
            blend=self.blend,
            before=self.before / energy,
            after=self.best / energy,
        )


def _solver(gram: Floats, alpha: float, features: int, rules: Rules) -> Solver:
    """Return a solver: products of z with residuals (f + 1, o) to the step (f + 1, o); factorized once."""
    size = len(gram) if rules.affine else len(gram) - 1
    diagonal = np.full(size, alpha * float(np.trace(gram[:-1, :-1])) / max(features, 1))
    if rules.affine:
        diagonal[-1] = 1e-9 * max(float(gram[-1, -1]), 1.0)  # the constant is not penalized, up to rounding
    inverse = ridge_solver(gram[:size, :size], diagonal)
    return inverse if rules.affine else lambda todo: np.append(inverse(todo[:-1]), np.zeros((1, todo.shape[1])), axis=0)
