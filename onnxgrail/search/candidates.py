"""Candidates of a search: decided and fitted as the final model is, and judged on samples that no fit has seen.

Held-out samples judge, or, if the data are too few to hold some back, two halves that judge each other's fits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Self

from onnxgrail.allocation.found import Judged, judged_of
from onnxgrail.allocation.ladders import Ladder
from onnxgrail.allocation.losses import Search, evidence
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import part_of, spread
from onnxgrail.calibration.judge import Judge
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.core import Change, View
from onnxgrail.errors import DataError
from onnxgrail.fidelity.loss import Loss
from onnxgrail.graph.cost import counting
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.progress import ticking
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.search.harms import TRIALS, Harm, Tried, harm_from, harm_of, power_of
from onnxgrail.search.path import Cost, Path, Widths, path_of

LEAST, MOST = 8, 64  # samples on which single blocks are tried
PASSES, MACS = 12, 5e11  # over the data, or multiply-accumulates if that is more, that all these trials may take
Settle = Callable[[Prepared, Mapping[str, int]], Ledger]
"""Decides and fits a model at given widths."""
HARM: Codec[Harm] = Codec(lambda harm: Record(notes=asdict(harm)), lambda record: harm_from(record.notes))
JUDGED: Codec[Judged] = Codec(lambda judged: Record(notes=asdict(judged)), lambda record: judged_of(record.notes))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """The blocks of a search, its limit and its cost.

    Attributes:
        search: the run, the blocks with their ladders, and the function that decides one.
        settle: decides and fits a candidate.
        cost: of the model at given widths.
        minimize: name of the cost.
        limit: largest loss.
    """

    search: Search
    settle: Settle
    cost: Cost
    minimize: str
    limit: float


@dataclass(frozen=True, slots=True, eq=False)
class _Fold:
    """A part of the data to fit to, and the numbers of the feeds that judge the fit."""

    fitted: Prepared
    judges: tuple[int, ...]


class Candidates:
    """A context manager that decides, fits and judges candidates of a task.

    Attributes:
        crossed: True if every sample is judged by a fit that has not seen it.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._batches, self._folds = _folds(task.search.prepared)
        self._stack = ExitStack()
        self.crossed = len(self._folds) > 1

    def __enter__(self) -> Self:
        self._judge = self._stack.enter_context(_judge(self._task, self._batches))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def loss(self, widths: Widths) -> Judged:
        """Return the loss of a candidate; one that an earlier run has judged is not judged again."""
        return self._task.search.job.steps.alone().once(_key(widths), lambda: self._judged(widths), JUDGED)

    def _judged(self, widths: Widths) -> Judged:
        task, prepared = self._task, self._task.search.prepared
        models = [(narrowed(prepared, task.settle(fold.fitted, widths)), fold.judges) for fold in self._folds]
        return told(self._judge.loss(*models))


def path_within(task: Task, most: float) -> Path:
    """Return the path of least harm, from the losses of all blocks alone.

    Args:
        task: see `Task`.
        most: predicted loss at which the path ends.
    """
    search, steps = task.search, task.search.job.steps.alone()
    prepared = search.prepared
    ladders = {ladder.name: ladder for ladder in search.ladders}
    tick = ticking(task.search.job.progress, "trying blocks", len(ladders))
    nothing = weights.empty(prepared.survey)
    some = _some(prepared, len(ladders))
    with Judge(prepared.model, some, task.search.recipe.providers) as judge:
        every = range(len(some))

        def trial(change: Change) -> Tried:
            ledger = weights.record(change, prepared.model, prepared.survey, nothing)
            loss = judge.loss((narrowed(prepared, ledger), every))
            return loss.mean, loss.kind

        def read(view: View) -> Harm:
            ladder: Ladder = ladders[view.block.name]
            harm = steps.once(
                f"harm {ladder.name}", lambda: harm_of(view, ladder, search.narrow, trial, task.limit), HARM
            )
            tick()
            return harm

        found = evidence(search, read)
    harms = [found[ladder.name] for ladder in search.ladders]
    return path_of(harms, task.cost, power_of(harms), most)


def _judge(task: Task, batches: Batches) -> Judge:
    """Return the judge of candidates; blocks alone are judged by the kinds of the outputs, which change smoothly."""
    prepared = task.search.prepared
    return Judge(prepared.model, batches, task.search.recipe.providers, prepared.metric)


def _some(prepared: Prepared, blocks: int) -> Batches:
    """Return feeds for the trials of single blocks, spread over all: so many that the trials do not take too long."""
    batches, trials = prepared.batches, TRIALS * max(blocks, 1)
    macs = counting.macs(prepared.model, prepared.survey) / prepared.samples
    samples = min(max(max(PASSES * batches.samples, MACS / max(macs, 1.0)) / trials, LEAST), MOST)
    each = max(1, batches.samples // max(len(batches), 1))
    count = min(len(batches), math.ceil(samples / each))
    return part_of(batches, spread(batches, count))


def _folds(prepared: Prepared) -> tuple[Batches, list[_Fold]]:
    """Return the feeds that judge, and the folds.

    Raises:
        DataError: there is only one feed.
    """
    if prepared.held_out is not None:
        batches = prepared.held_out.batches
        return batches, [_Fold(prepared, tuple(range(len(batches))))]
    batches, count = prepared.batches, len(prepared.batches)
    if count < 2:
        raise DataError(
            f"{batches.source} has a single batch of {batches.samples} samples: none is left to judge the loss",
            hint="Give more samples, a smaller --batch-size, or --held-out DATA",
        )
    halves = [tuple(range(start, count, 2)) for start in (0, 1)]
    return batches, [_Fold(_part(prepared, halves[1 - n]), halves[n]) for n in (0, 1)]


def _part(prepared: Prepared, numbers: tuple[int, ...]) -> Prepared:
    batches = prepared.batches
    return replace(prepared, batches=part_of(batches, [batches.feeds[number] for number in numbers]))


def _key(widths: Widths) -> str:
    """Return the key of a candidate in the folder of a run that can be continued."""
    return f"loss {hashlib.sha256(json.dumps(widths, sort_keys=True).encode()).hexdigest()[:16]}"


def told(loss: Loss) -> Judged:
    """Convert a loss to the plain numbers of a report."""
    agreement = loss.agreement
    return Judged(
        output=loss.output,
        part=loss.part,
        name=loss.name,
        kind=loss.kind,
        samples=len(loss.values),
        mean=loss.mean,
        bound=loss.bound,
        agreement={**asdict(agreement), "settled_by": agreement.settled_by()},
    )
