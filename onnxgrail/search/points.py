"""Candidates at places of a path, each a like share of the cost of the one before, decided, fitted and judged."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from onnxgrail.allocation.few import Bits
from onnxgrail.allocation.found import Judged
from onnxgrail.allocation.ladders import Widths
from onnxgrail.machine.progress import ticking
from onnxgrail.search.bisect import Seek, farthest_of
from onnxgrail.search.bits import split
from onnxgrail.search.candidates import Candidates, Task
from onnxgrail.search.path import Path
from onnxgrail.search.trials import paths_within
from onnxgrail.search.within import BEYOND, PATIENCE, SLACK

TINY = 1e-6  # share of the cost that counts as none


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
    paths = paths_within(task, BEYOND * task.limit + SLACK)
    patience = PATIENCE[task.search.recipe.effort]
    tick = ticking(task.search.job.progress, "judging points", count + patience.tries)
    with Candidates(task) as candidates:

        @functools.cache
        def judged(path: Path, steps: int) -> Spot:
            widths = path.widths(steps)
            tick()
            blocks, bits = split(widths)
            return Spot(
                widths=blocks, bits=bits, predicted=path.loss(steps), loss=candidates.loss(widths, whole=steps == 1)
            )

        def bound(path: Path, steps: int) -> float:
            return judged(path, steps).loss.bound

        path, best = farthest_of(paths, Seek(task.limit, bound, lambda: False, patience))
        places = spread(path, max(best, 1), count) if len(path) else ()
        return tuple(judged(path, steps) for steps in places), candidates.crossed


def spread(path: Path, last: int, count: int) -> tuple[int, ...]:
    """Return ascending steps up to `last`, each with a like share of the cost before it; fewer if there are few.

    In equal steps, the last one would take most of what is left of a small file, and most of its quality.

    Args:
        path: nested widths.
        last: the largest number.
        count: wanted numbers.
    """
    steps = range(1, last + 1)
    if last <= count:
        return tuple(steps)
    costs = np.log(np.maximum([path.before, *(path.cost(n) for n in steps)], TINY * path.before))
    wanted = np.linspace(costs[0], costs[-1], count + 1)[1:-1]
    places = {1 + int(np.abs(costs[1:] - cost).argmin()) for cost in wanted}
    return tuple(sorted(places | {last}))
