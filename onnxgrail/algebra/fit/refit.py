"""Fits a consumer's weights to the dense network's outputs, on rows of two networks run side by side.

Regressors z are the consumer's inputs in the narrowed network. Targets t are the dense network's outputs at that point,
less the residual that the narrowed network adds there. So a fit corrects upstream errors as well as its own narrowing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.algebra.fit.choice import MANY, SOME, Choice, Fitted, Rules
from onnxgrail.algebra.moments.few_rows import span
from onnxgrail.algebra.moments.regression import Moments
from onnxgrail.algebra.solve.ridge import Solver, ridge_factor, ridge_solver
from onnxgrail.algebra.solve.shared import each
from onnxgrail.core import Floats


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
    judged = total if len(judging) == len(folds) else functools.reduce(Moments.__add__, judging)
    choices = []
    first = 0
    for starts in layers:
        part = slice(first, first := first + starts[0].shape[1])
        mine = [held.outputs(part) for held in judging]
        choices.append(Choice.among(starts, total.outputs(part), judged.outputs(part), mine, rules))
    solvers = functools.partial(_solvers, folds, total, features, rules)
    if total.count:
        _search(choices, solvers, rules)
    final = {
        a: _with_constant(ridge_solver(*_system(total.gram, None, a, features, rules)), rules)
        for a in {c.alpha for c in choices if c.blend and c.alpha}
    }
    return [choice.settled(final) for choice in choices]


def _search(choices: Sequence[Choice], solvers: Callable[[float], Iterator[Solver | None]], rules: Rules) -> None:
    """Let choices search their ridge, first for a few outputs; the likely ones are judged for more.

    Processes that compute together try one ridge each, so a choice learns all from the arrays that `each` yields.
    """
    alphas, made = rules.alphas, dict[float, Solver]()
    last: dict[float, Solver] = {}  # the solver of the best ridge so far, to be reused; only with one judge

    def tried(place: int) -> Floats:
        searching = [choice for choice in choices if choice.searching]
        solver = _measure(searching, solvers(alphas[place]) if searching else (), SOME)
        if solver and rules.judges == 1:
            made[alphas[place]] = solver
        return np.array([[*choice.slopes, *choice.curves] for choice in choices])

    for alpha, seen in zip(alphas, each(range(len(alphas)), tried), strict=False):
        searching = [choice for choice in choices if choice.searching]
        for choice, row in zip(choices, seen.reshape(len(choices), 2, -1), strict=True):
            choice.slopes, choice.curves = row
        promises = [choice.note(alpha) for choice in searching]
        solver = made.pop(alpha, None)
        if any(promises):
            last = {alpha: solver} if solver else {}
        del solver  # frees its memory before the next one is built
        if not any(choice.searching for choice in choices):
            break
    likely = sorted({c.likely for c in choices if c.likely}, reverse=True)

    def judged(place: int) -> Floats:
        alpha = alphas[place]
        promised = [choice for choice in choices if choice.likely == alpha]
        _measure(promised, [last.pop(alpha)] if alpha in last else solvers(alpha), MANY)
        return np.array([[choice.begins(), *choice.slopes, *choice.curves] for choice in promised])

    made.clear()
    for alpha, seen in zip(likely, each([alphas.index(alpha) for alpha in likely], judged), strict=True):
        promised = [choice for choice in choices if choice.likely == alpha]
        for choice, row in zip(promised, seen.reshape(len(promised), -1), strict=True):
            choice.slopes, choice.curves = row[1:].reshape(2, -1)
            choice.take(alpha, float(row[0]))


def _measure(choices: Sequence[Choice], solvers: Iterable[Solver | None], count: int) -> Solver | None:
    """Let choices evaluate a ridge on the held-out folds, for some outputs; return the last solver.

    A step that is no descent on one fold fails whatever the others say, so a choice does not look at them. None gains
    if a system is singular: a weaker ridge is not told from rounding errors of the sums.
    """
    solver = None
    for choice in choices:
        choice.slopes[:], choice.curves[:] = 0.0, 0.0
    for number, solver in enumerate(solvers):
        if solver is None:
            break
        for choice in choices:
            choice.see(number, solver, count=count)
        choices = [choice for choice in choices if choice.slopes[number] > 0.0]
        if not choices:
            break
    return solver


def _solvers(
    folds: Sequence[Moments], total: Moments, features: int, rules: Rules, alpha: float
) -> Iterator[Solver | None]:
    """Yield a solver per judge, from all rows but its own; None if the system is singular."""
    for held in folds[-rules.judges :]:
        others = [fold.gram for fold in folds if fold is not held]
        whole, less = (others[0], None) if len(others) == 1 else (total.gram, held.gram)
        found = ridge_factor(*_system(whole, less, alpha, features, rules))
        yield None if found is None else _with_constant(found, rules)


def _system(whole: Floats, less: Floats | None, alpha: float, features: int, rules: Rules) -> tuple[Floats, Floats]:
    """Return the Gram matrix of a system, a view if all rows count, and its ridges.

    Args:
        whole: sum z zT (f + 1, f + 1).
        less: the same over rows of it that do not count; None if all count.
        alpha: ridge parameter.
        features: the number of features that its unit is the mean second moment of.
        rules: whether the constant takes part.
    """
    squares = np.diagonal(whole).astype(np.float64)
    squares = squares if less is None else squares - np.diagonal(less)
    size = len(whole) if rules.affine else len(whole) - 1
    diagonal = np.full(size, alpha * float(squares[:-1].sum()) / max(features, 1))
    if rules.affine:
        diagonal[-1] = 1e-9 * max(float(squares[-1]), 1.0)  # the constant is not penalized, up to rounding
    own = whole[:size, :size]
    return (own if less is None else own - less[:size, :size]), diagonal


def _with_constant(inverse: Solver, rules: Rules) -> Solver:
    """Return a solver: products of z with residuals (f + 1, o) to the step (f + 1, o), 0 for a constant that stays."""
    return inverse if rules.affine else lambda todo: np.append(inverse(todo[:-1]), np.zeros((1, todo.shape[1])), axis=0)
