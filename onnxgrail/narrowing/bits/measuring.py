"""Schedules of widths, and bits beside them, from losses that are measured."""

from __future__ import annotations

import dataclasses
import functools

from onnxgrail.allocation.few import Bits
from onnxgrail.allocation.ladders import Cost, Ideal
from onnxgrail.allocation.losses import Search, tells
from onnxgrail.allocation.measures import Measure
from onnxgrail.graph.io.model_file import HEAVY
from onnxgrail.narrowing.searching import task_of
from onnxgrail.search.bits import cost_of
from onnxgrail.search.harms import Near
from onnxgrail.search.trials import schedule_near, together_near


def measuring(search: Search) -> Search:
    """Return a search that measures losses where data can tell."""
    together = functools.partial(_together, search) if tells(search.prepared, search.recipe, HEAVY) else None
    return dataclasses.replace(search, least_harm=functools.partial(_least_harm, search), together=together)


def _together(search: Search, measure: Measure, share: float, limit: float) -> tuple[Bits, Ideal]:
    """Return bits and the schedule that lose least for a size; see `Together`."""
    return together_near(task_of(search, cost_of(measure, search.rungs), Near(share=share)), limit)


def _least_harm(search: Search, cost: Cost, share: float) -> Ideal:
    """Return the schedule that loses least for a cost, from losses measured near a share of the units removed."""
    return schedule_near(task_of(search, cost, Near(share=share)))
