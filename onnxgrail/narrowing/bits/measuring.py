"""Schedules of widths, and bits beside them, from losses that are measured."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from onnxgrail.allocation import schedules
from onnxgrail.allocation.balance import balanced
from onnxgrail.allocation.few import Bits
from onnxgrail.allocation.ladders import Cost, Ideal, Widths
from onnxgrail.allocation.losses import Search, Ways, tells
from onnxgrail.allocation.measures import Measure
from onnxgrail.core import Floats
from onnxgrail.graph.io.model_file import HEAVY
from onnxgrail.narrowing.searching import task_of
from onnxgrail.search.bits import cost_of, step_of
from onnxgrail.search.candidates import Task
from onnxgrail.search.harms import Near
from onnxgrail.search.trials import Parts, losses_of, parts_of, schedule_near, together_near

ERRORS = 1.5  # standard errors by which losses have to fall: chance does that in 1 of 12 cases (gain of 10 samples)


def measuring(search: Search) -> Search:
    """Return a search that measures losses where data can tell."""
    together = functools.partial(_together, search) if tells(search.prepared, search.recipe, HEAVY) else None
    return dataclasses.replace(search, least_harm=functools.partial(_least_harm, search), together=together)


def _together(search: Search, measure: Measure, share: float, limit: float) -> Ways:
    """Return bits and schedules that lose little for a size; see `Together`."""
    task = task_of(search, cost_of(measure, search.rungs), Near(share=share))
    parts = parts_of(search.prepared) if task.judged else None
    return Ways(together_near(task, limit, parts), functools.partial(_least, task, parts))


def _least(task: Task, parts: Parts | None, candidates: Sequence[tuple[Widths, Bits]]) -> int:
    """Return the number of the candidate with the least mean loss; the first if no samples can judge."""
    if parts is None:
        return 0
    together = [{**widths, **{step_of(weight): few for weight, few in bits.items()}} for widths, bits in candidates]
    return int(np.argmin([losses.mean() for losses in losses_of(task, together, parts)]))


def _least_harm(search: Search, cost: Cost, limit: float) -> Ideal:
    """Return the schedule that loses least where a cost is within a limit; see `LeastHarm`.

    The path of least harm adds up the losses of single blocks, which misleads where blocks depend on each other. So
    widths halfway to equal shares are decided, fitted and judged, too, and equal shares if those lose less. The best of
    what loses less than the path is taken.
    """
    ladders = search.ladders

    def widths(ideal: Ideal) -> Widths:
        found = balanced(ladders, ideal, cost, limit, strict=False).widths
        return search.prepared.paying(found, cost)

    even = schedules.uniform(ladders)
    shares = widths(even)
    lost = [1 - shares[one.name] / one.units for one in ladders if shares[one.name] < one.units]
    share = float(np.mean(lost or [0.0]))
    task = task_of(search, cost, Near(share=share))
    parts = parts_of(search.prepared) if task.judged else None
    path = schedule_near(task, parts)
    ways = path, schedules.between(path, even), even
    found = [widths(ideal) for ideal in ways]
    if parts is None or found[0] == found[1]:
        return path
    with closing(losses_of(task, found, parts)) as judged:
        losses = [next(judged), next(judged)]
        if losses[1].mean() < losses[0].mean():
            losses.append(next(judged))
    less = [number for number in range(1, len(losses)) if _less(losses[0], losses[number])]
    return ways[min(less, key=lambda number: losses[number].mean(), default=0)]


def _less(before: Floats, after: Floats) -> bool:
    """Return True if the losses of the same samples fall by more than chance explains.

    Another output may be the worst one, and have several losses per sample, as states of several layers do.
    """
    count = math.gcd(before.size, after.size)
    gain = before.reshape(count, -1).mean(axis=1) - after.reshape(count, -1).mean(axis=1)
    return gain.size > 1 and float(gain.mean()) > ERRORS * float(gain.std(ddof=1)) / math.sqrt(gain.size)
