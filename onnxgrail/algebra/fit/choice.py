"""The choice of start, ridge and step length for one layer, by held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgrail.algebra.moments.regression import Moments, dot, error_of
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.algebra.solve.ridge import Solver
from onnxgrail.core import Floats

ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
MARGIN = 1e-3
WORTH = 1e-4  # relative decrease of the held-out error that a weaker ridge needs
SOME, MANY = 64, 512  # outputs of a layer that are used to search its ridge, and to judge it
ENOUGH = 2  # weaker ridges in a row without a decrease that end the search
LIKELY = 0.5  # share of `margin` that a few outputs must gain for all of them to be judged


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


@dataclass(kw_only=True, slots=True, eq=False)
class Choice:
    """The best choice so far for one layer, evaluated on held-out rows.

    Attributes:
        total, judging: sums over all rows, and over those of each judging fold.
        all: products of z with the residuals of the start, over all rows.
        open: the same per judging fold and slice of outputs, computed once.
        slopes, curves: coefficients of each fold's held-out error, a parabola in the step length.
        begin, best: held-out error of the start, and of the best choice so far.
        promising, promise: the best ridge for a few outputs so far, and its decrease of the error.
        worse: weaker ridges since then; highest: the largest decrease so far, also one that is only a trace.
    """

    total: Moments
    judging: Sequence[Moments]
    rules: Rules
    place: int
    start: Floats
    all: Floats
    slopes: Floats
    curves: Floats
    before: float
    begin: float
    best: float
    alpha: float | None
    energy: float
    open: dict[tuple[int, int], Floats] = field(default_factory=dict)
    blend: float = 0.0
    promising: float = 0.0
    promise: float = 0.0
    worse: int = 0
    highest: float = 0.0

    @classmethod
    def among(
        cls, starts: Sequence[Floats], total: Moments, judged: Moments, judging: Sequence[Moments], rules: Rules
    ) -> Choice:
        """Choose the best of the starts; `judged` are the sums over all judging folds."""
        first, best = np.inf, np.inf
        targets = judged.targets()
        for number, weights in enumerate(starts):
            begin = np.concatenate([weights, np.zeros((1, weights.shape[1]))], dtype=total.gram.dtype)
            product = linear().product(judged.gram, begin)
            gap = error_of(judged.energy, begin, product, targets)
            first = gap if number == 0 else first
            if number == 0 or gap < min(best, first * (1.0 - rules.margin)):
                best, place, start, chosen = gap, number, begin, product
            del product
        slopes, curves = np.zeros((2, len(judging)))
        if judged.gram is not total.gram:
            targets, chosen = total.targets(), linear().product(total.gram, start)
        return cls(
            total=total,
            judging=judging,
            rules=rules,
            place=place,
            start=start,
            all=targets - chosen,
            slopes=slopes,
            curves=curves,
            before=first,
            begin=best,
            best=best,
            alpha=np.inf if place else None,
            energy=float(judged.energy.sum()) or 1.0,
        )

    def _some(self, count: int) -> slice:
        """Return about `count` outputs, equally spaced."""
        return slice(None, None, -(-self.start.shape[1] // count) or 1)

    def _rest(self, number: int, count: int) -> Floats:
        """Return the products of z with the residuals of the start, over a fold and for some outputs."""
        held, some = self.judging[number], self._some(count)
        if (number, count) not in self.open:
            self.open[number, count] = held.targets(some) - linear().product(held.gram, self.start[:, some])
        return self.open[number, count]

    def see(self, number: int, solver: Solver, *, count: int) -> None:
        """Evaluate on one fold a step that was fitted to the other folds, for some outputs."""
        held, rest, some = self.judging[number], self._rest(number, count), self._some(count)
        if self.rules.prior:
            step = solver(self.all[:, some] - rest)
        else:
            step = solver(self.total.targets(some) - held.targets(some)) - self.start[:, some]
        self.slopes[number] = dot(step, rest)
        self.curves[number] = dot(step, linear().product(held.gram, step.astype(held.gram.dtype, copy=False)))

    def _gains(self) -> tuple[float, Floats]:
        """Return the best step length, and the decrease of each fold's error at that length."""
        share = min(max(self.slopes.sum() / self.curves.sum(), 0.0), 1.0) if self.curves.any() else 0.0
        share = float(share) if self.rules.blend else 1.0
        return share, 2.0 * share * self.slopes - share * share * self.curves

    def note(self, alpha: float) -> bool:
        """Return True if a ridge gains most so far for a few outputs, which represent all outputs.

        After the best ridge the gain falls with every weaker one, also where it is only a trace. A ridge that gains
        nothing says nothing: where a few features are huge, all but the weakest gain nothing or a trace.
        """
        gains, begin = self._gains()[1], self._begin
        found, gained = float(gains.sum()), bool((gains > 0.0).all())
        falls = self.rules.prior and gained and found <= self.highest
        self.highest = max(self.highest, found if gained else 0.0)
        if gained and found > self.promise + WORTH * max(begin - self.promise, 0.0):
            self.promise, self.promising, self.worse = found, alpha, 0
        elif falls or self.promising:
            self.worse += 1
        return self.promising == alpha

    @property
    def _begin(self) -> float:
        """The held-out error of the start for a few outputs: approximately, from that of all."""
        every = max(self.start.shape[1], 1)
        return float(self.begin * min(SOME, every) / every)

    @property
    def searching(self) -> bool:
        """True if a weaker ridge may gain more."""
        return self.worse < ENOUGH

    @property
    def likely(self) -> float:
        """The best ridge for a few outputs; 0 if it hardly gains enough for all of them."""
        return self.promising if self.promise >= LIKELY * self.rules.margin * self._begin else 0.0

    def begins(self) -> float:
        """Return the error of the start on all judging folds, for the outputs that judge a ridge."""
        begin, some = 0.0, self._some(MANY)
        for number, held in enumerate(self.judging):
            products = held.targets(some) + self._rest(number, MANY)
            begin += float(held.energy[some].sum() - dot(self.start[:, some], products))
        return begin

    def take(self, alpha: float, begin: float) -> None:
        """Take the step if it lowers the held-out error enough, and, with several judges, that of each of them.

        Args:
            alpha: its ridge.
            begin: result of `begins`.
        """
        share, gains = self._gains()
        gap = self.begin * max(1.0 - float(gains.sum()) / begin, 0.0) if begin > 0.0 else 0.0
        if gap < self.best * (1.0 - self.rules.margin) and (gains > 0.0).all():
            self.best, self.alpha, self.blend = gap, alpha, share

    def settled(self, solvers: Mapping[float, Solver]) -> Fitted:
        """Solve the choice on all rows."""
        weights = self.start
        if self.blend and self.alpha:
            solver = solvers[self.alpha]
            step = solver(self.all) if self.rules.prior else solver(self.total.targets()) - self.start
            weights = weights + self.blend * step
        return Fitted(
            weights=weights[:-1],
            shift=weights[-1],
            start=self.place,
            alpha=self.alpha,
            blend=self.blend,
            before=self.before / self.energy,
            after=self.best / self.energy,
        )
