"""Candidates at places of a path that are evenly spread in cost, each decided, fitted and judged."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from onnxgrail.allocation.few import Bits
from onnxgrail.allocation.found import Judged
from onnxgrail.allocation.ladders import Widths
from onnxgrail.machine.progress import ticking
from onnxgrail.search.bisect import farthest_of
from onnxgrail.search.bits import split
from onnxgrail.search.candidates import Candidates, Task
from onnxgrail.search.path import Path
from onnxgrail.search.trials import paths_within
from onnxgrail.search.within import BEYOND, PATIENCE, SLACK


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A judged candidate.

    Attributes:
        widths: block name to units; a later candidate has no wider block.
        bits: weight to bits; a later candidate has no more of them.
        predicted: loss from the losses of single blocks.
        loss: measured.
    """

    widths: Widths
    bits: Bits
    predicted: float
    loss: Judged


def spots_of(task: Task, count: int) -> tuple[tuple[Spot, ...], bool]:
    """Return candidates from the cheapest step to the limit, and True if each was judged by a fit without the samples.

    Args:
        task: its limit is the largest upper bound of a loss; a single candidate may exceed it.
        count: most candidates.

    Raises:
        DataError: no samples can judge a candidate.
    """
    without = paths_within(task, BEYOND * task.limit + SLACK)
    patience = PATIENCE[task.search.recipe.effort]
    tick = ticking(task.search.job.progress, "judging points", count + patience.tries)
    with Candidates(task) as candidates:

        @functools.cache
        def judged(path: Path, steps: int) -> Spot:
            widths = path.widths(steps)
            tick()
            blocks, bits = split(widths)
            return Spot(widths=blocks, bits=bits, predicted=path.loss(steps), loss=candidates.loss(widths))

        def bound(path: Path, steps: int) -> float:
            return judged(path, steps).loss.bound

        path, best = farthest_of(without, task.limit, bound, lambda: False, patience)
        places = spread(path, max(best, 1), count) if len(path) else ()
        return tuple(judged(path, steps) for steps in places), candidates.crossed


def spread(path: Path, last: int, count: int) -> tuple[int, ...]:
    """Return ascending numbers of steps up to `last` whose costs are evenly spread; fewer if steps are few.

    Args:
        path: nested widths.
        last: the largest number.
        count: wanted numbers.
    """
    steps = range(1, last + 1)
    if last <= count:
        return tuple(steps)
    each = (path.before - path.cost(last)) / count
    places = {min(steps, key=lambda n: abs(path.before - number * each - path.cost(n))) for number in range(1, count)}
    return tuple(sorted(places | {last}))
