"""Finds the widths that cost least within a loss: losses of single blocks, a path of nested widths, candidates on it.

Every candidate is decided and fitted as the final model is, and judged on samples that it was not fitted to: on
held-out samples, or, if the data are too few to hold some back, by two halves that judge each other's fits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxgrail.allocation.found import Candidate, Found, Judged, rounded_up
from onnxgrail.allocation.ladders import Widths
from onnxgrail.machine.progress import ticking
from onnxgrail.search.bisect import Patience, Seek, cheaper, farthest_of
from onnxgrail.search.bits import split
from onnxgrail.search.candidates import Candidates, Task, key_of
from onnxgrail.search.path import Path, Step
from onnxgrail.search.trials import paths_within

BEYOND = 3.0  # times the limit: predicted loss at which the path ends
SLACK = 0.02  # the same, added: predictions of small losses are far off
PATIENCE = {"fast": Patience(3, 0.7), "normal": Patience(5, 0.88), "max": Patience(10, 0.95)}
"""By effort."""
FAILED = 3  # candidates of which none holds, after which the whole model in its bits is judged
NEXT, FAR = 2.0, 4.0  # times the limit: the larger loss whose cost is predicted, and the largest one that is told


def within(task: Task) -> tuple[Widths, Found]:
    """Return the widths of lowest cost whose loss is within the limit, and how they were found.

    Args:
        task: see `Task`.

    Raises:
        DataError: no samples can judge a candidate.
    """
    started, budget = time.monotonic(), task.search.recipe.budget_seconds
    paths = paths_within(task, BEYOND * task.limit + SLACK)
    tried: dict[str, Candidate] = {}
    smallest: list[tuple[Step, Judged]] = []
    narrows = False
    patience = PATIENCE[task.search.recipe.effort]
    tick = ticking(task.search.job.progress, "searching", patience.tries)
    with Candidates(task) as candidates:

        def bound(path: Path, steps: int) -> float:
            nonlocal narrows
            widths = path.widths(steps)
            if (known := tried.get(key_of(widths))) is not None:
                return known.loss.bound
            narrows |= task.search.narrows(split(widths)[0])
            loss = candidates.loss(widths, whole=steps <= 1)  # an error tells these
            if steps == 1:
                smallest.append((path.steps[0], loss))
            one = Candidate(steps=steps, cost=path.cost(steps), predicted=path.loss(steps), loss=loss)
            tried[key_of(widths)] = one
            tick()
            return loss.bound

        def over() -> bool:
            return budget is not None and time.monotonic() - started > budget

        def late() -> bool:
            """Return True where no time is left, or where fewer bits alone lose too much, so that nothing can hold."""
            if over():
                return True
            none = len(tried) >= FAILED and all(one.loss.bound > task.limit for one in tried.values())
            return none and task.search.recipe.quantize != "none" and bound(paths.without(), 0) > task.limit

        seek = Seek(task.limit, bound, late, patience)
        path, best = farthest_of(paths, seek)
        if task.search.rungs and narrows:  # bits alone may go on where a width ended the path
            path, best = cheaper((path, best), paths.without([block.name for block in task.search.blocks]), seek)
        if not best and task.search.recipe.quantize != "none":
            bound(path, best)  # the whole model with rounded weights
        ended = over()
    found = _found(task, path, tried, best, _cheapest(path, smallest), crossed=candidates.crossed)
    return path.widths(best), replace(found, ended=ended)


def _found(
    task: Task,
    path: Path,
    tried: Mapping[str, Candidate],
    best: int,
    cheapest: tuple[str, int, int] | None,
    *,
    crossed: bool,
) -> Found:
    """Return the report of the search; the keys of the candidates are those of their widths."""
    last = key_of(path.widths(best))
    holds = last in tried and tried[last].loss.bound <= task.limit
    chosen = list(tried).index(last) if holds else None
    more = None if chosen is None else further(path, list(tried.values()), best, task.limit)
    return Found(
        limit=task.limit,
        minimize=task.minimize,
        before=path.before,
        cost=path.cost(best),
        crossed=crossed,
        tried=tuple(tried.values()),
        chosen=chosen,
        next_limit=None if more is None else more[0],
        next_cost=None if more is None else more[1],
        cheapest=cheapest,
        key=last,
    )


def _cheapest(path: Path, alone: Sequence[tuple[Step, Judged]]) -> tuple[str, int, int] | None:
    """Return the smallest step that loses least: block, width, units; the first one of the path if none was tried."""
    steps = [step for step, _ in sorted(alone, key=lambda one: one[1].bound)] or path.steps
    return (steps[0].block, steps[0].width, path.full[steps[0].block]) if steps else None


def further(path: Path, tried: Sequence[Candidate], best: int, limit: float) -> tuple[float, float] | None:
    """Return a larger loss and the cost that it allows: the lowest one that was measured, else the predicted one.

    Args:
        path: the steps.
        tried: the candidates.
        best: number of steps that hold.
        limit: of the loss that they keep.
    """
    beyond = [one for one in tried if limit < one.loss.bound <= FAR * limit and one.cost < path.cost(best)]
    if beyond:
        least = min(beyond, key=lambda one: one.cost)
        return rounded_up(least.loss.bound), least.cost
    following = path.reach(NEXT * path.loss(best))
    return (NEXT * limit, path.cost(following)) if following > best else None
