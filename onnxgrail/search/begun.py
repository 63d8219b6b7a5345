"""Runs candidates from a cut on: the original model has computed what is before it, for all candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxgrail.allocation.losses import Search
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.judge import Answers, Judge
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.beginnings import Beginnings
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.stream.stream import Stream
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


Fit = tuple[Callable[[], Made], Sequence[int]]
"""Makes a candidate, with the numbers of the feeds that judge it."""


def loss_of_fits(
    search: Search, beginnings: Beginnings | None, judge: Judge, fits: Sequence[Fit], limit: float = math.inf
) -> Loss:
    """Return the loss of candidates; what the original computes before them is not run again.

    Args:
        search: the run.
        beginnings: cuts of the original.
        judge: of the original.
        fits: the candidates.
        limit: if the first candidates show that the loss exceeds it, the others are not made.
    """
    if judge.own:
        return judge.loss(*((make().model(), numbers) for make, numbers in fits))
    answers = (_running(search, beginnings, judge, fit) for fit in fits)
    return judge.loss_of(answers, [number for _, numbers in fits for number in numbers], limit)


@contextmanager
def _running(search: Search, beginnings: Beginnings | None, judge: Judge, fit: Fit) -> Iterator[Answers]:
    """Give the outputs of a candidate on the feeds that judge it."""
    prepared, (make, numbers) = search.prepared, fit
    made, batches = make(), judge.some(numbers)
    place = _place(search, beginnings, made, batches)
    if made.ledger is None or place is None:
        with judge.running(made.model(), numbers) as answers:
            yield answers
        return
    part = replace(prepared, batches=batches)
    with stream_of(part, search.recipe, beginning=place) as stream:
        yield recorded(part, judge, stream, made.ledger, numbers)


def recorded(prepared: Prepared, judge: Judge, stream: Stream, ledger: Ledger, numbers: Sequence[int]) -> Answers:
    """Return the outputs of a candidate that a stream runs.

    Args:
        prepared: the model.
        judge: of the original.
        stream: its feeds are those that judge.
        ledger: the decisions by which the candidate differs from the original.
        numbers: of these feeds.
    """
    rows = judge.named(stream.record(stream.after(judge.read.values()), ledger))
    return Answers(numbers, lambda _: rows, changed(prepared.model, prepared.survey, ledger.dead))


def _place(search: Search, beginnings: Beginnings | None, made: Made, batches: Batches) -> Beginning | None:
    """Return the place where a candidate may begin on some feeds; None for the feeds."""
    prepared = search.prepared
    if made.ledger is None or beginnings is None or in_files(prepared.model):
        return None
    if prepared.routes and not {*batches.feeds} <= prepared.routes.keys():  # branches of other feeds are unknown
        return None
    return beginnings.before(batches, first_change(prepared.model.graph, prepared.survey, made.ledger))
