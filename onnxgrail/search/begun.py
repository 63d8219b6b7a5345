"""Runs candidates from a cut on: the original model has computed what is before it, for all candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxgrail.allocation.losses import Search
from onnxgrail.calibration.judge import Answers, Judge
from onnxgrail.calibration.stream.beginnings import Beginnings
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.fidelity.loss import Loss
from onnxgrail.graph.cuts.reach import first_change
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.rewrite.interface import changed
from onnxgrail.graph.trace.survey import Ledger


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A candidate.

    Attributes:
        model: returns it.
        ledger: the decisions by which it differs from the original; None if there is more.
    """

    model: Callable[[], ir.Model]
    ledger: Ledger | None


Fit = tuple[Made, Sequence[int]]
"""A candidate with the numbers of the feeds that judge it."""


def loss_of_fits(search: Search, beginnings: Beginnings | None, judge: Judge, fits: Sequence[Fit]) -> Loss:
    """Return the loss of candidates; what the original computes before them is not run again.

    Args:
        search: the run.
        beginnings: cuts of the original.
        judge: of the original.
        fits: the candidates.
    """
    prepared, recipe, answers = search.prepared, search.recipe, list[Answers]()
    places = [_place(search, beginnings, judge, fit) for fit in fits]
    with ExitStack() as stack:
        for (made, numbers), place in zip(fits, places, strict=True):
            if made.ledger is None or place is None:
                return judge.loss(*((made.model(), numbers) for made, numbers in fits))
            part = replace(prepared, batches=judge.some(numbers))
            stream = stack.enter_context(stream_of(part, recipe, beginning=place))
            outputs = stream.record(stream.after(judge.read.values()), made.ledger)
            answers.append(Answers(numbers, outputs, changed(prepared.model, prepared.survey, made.ledger.dead)))
        return judge.loss_of(*answers)


def _place(search: Search, beginnings: Beginnings | None, judge: Judge, fit: Fit) -> Beginning | None:
    """Return the place where a candidate may begin on some feeds; None for the feeds."""
    prepared, (made, numbers) = search.prepared, fit
    batches = judge.some(numbers)
    if made.ledger is None or beginnings is None or judge.own or in_files(prepared.model):
        return None
    if prepared.routes and not {*batches.feeds} <= prepared.routes.keys():  # branches of other feeds are unknown
        return None
    return beginnings.before(batches, first_change(prepared.model.graph, prepared.survey, made.ledger))
