"""Candidates of a search: decided and fitted as the final model is, and judged on samples that no fit has seen.

Held-out samples judge, or, if the data are too few to hold some back, two halves that judge each other's fits.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Self

import onnx_ir as ir

from onnxgrail.allocation.few import Bits
from onnxgrail.allocation.found import Judged, judged_of
from onnxgrail.allocation.ladders import Cost, Widths
from onnxgrail.allocation.losses import Search
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import check_halves, part_of
from onnxgrail.calibration.judge import Judge, Outputs
from onnxgrail.calibration.metric import Metric
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.stream.beginnings import Beginnings
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.loss import Loss
from onnxgrail.graph.rewrite.weights import empty
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.search.begun import Fit, Made, loss_of_fits
from onnxgrail.search.bits import split
from onnxgrail.search.harms import Near

Settle = Callable[[Prepared, Mapping[str, int]], Ledger]
"""Decides and fits a model at given widths."""
Rounds = Callable[[Prepared, ir.Model, Ledger, Bits], ir.Model]
"""Rounds the weights of a model that some decisions narrowed."""
JUDGED: Codec[tuple[Judged, bool]] = Codec(
    lambda found: Record(notes={"loss": asdict(found[0]), "backward": found[1]}),
    lambda record: (Judged(**record.notes["loss"]), bool(record.notes["backward"])),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """The blocks of a search, its limit and its cost.

    Attributes:
        search: the run, the blocks with their ladders, and the function that decides one.
        form: returns the model in the bases that blocks of these names need, as it is written if only these lose units.
        settle: decides and fits a candidate.
        cost: of the model at given widths.
        minimize: name of the cost.
        near: where losses matter: the largest loss, or a share of the units.
        decide: decides a model without fits of other layers; None if `settle` has no such fits.
        rounded: gives weights of a narrowed model their bits; None if all stay in float.
        outputs: of the original model, for all that judges trials and candidates.
        beginnings: cuts of the original model where fits and candidates begin; None if all begin at the feeds.
    """

    search: Search
    form: Callable[[frozenset[str]], Prepared]
    settle: Settle
    cost: Cost
    minimize: str
    near: Near
    decide: Settle | None = None
    rounded: Rounds | None = None
    outputs: Outputs = field(default_factory=Outputs)
    beginnings: Beginnings | None = None

    @property
    def limit(self) -> float:
        """Return the largest loss."""
        return self.near.limit

    @property
    def judged(self) -> bool:
        """Return True if some samples can judge fits to the others."""
        return self.search.prepared.held_out is not None or len(self.search.prepared.batches) > 1

    def made(self, part: Prepared, widths: Widths) -> Made:
        """Return a candidate that is decided, fitted and rounded on a part of the data.

        Args:
            part: the model with that part.
            widths: of blocks, and bits of weights as `bits.step_of` names them.
        """
        prepared = self.search.prepared
        blocks, bits = split(prepared.paying(widths, self.cost))
        names = frozenset(block.name for block in prepared.survey.narrowed(blocks))
        form = self.form(names)
        if form is not prepared:
            part = replace(form, batches=part.batches)
        ledger = self.settle(part, blocks) if names else empty(form.survey)
        if self.rounded is None and form is prepared:
            return self.decided(ledger)
        slim = narrowed(form, ledger)
        return Made(lambda: slim if self.rounded is None else self.rounded(part, slim, ledger, bits), None)

    def decided(self, ledger: Ledger) -> Made:
        """Return a candidate of which all is decided."""
        return Made(lambda: narrowed(self.search.prepared, ledger), ledger)

    def loss(self, judge: Judge, *fits: Fit, limit: float = math.inf) -> Loss:
        """Return the loss of candidates, each on the feeds of some numbers; for `limit` see `loss_of_fits`."""
        return loss_of_fits(self.search, self.beginnings, judge, fits, limit)


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
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
        self._batches, self._folds = folds_of(task.search.prepared)
        self._stack = ExitStack()
        self.crossed = len(self._folds) > 1
        self._backward = False

    def __enter__(self) -> Self:
        self._judge = self._stack.enter_context(judge_of(self._task, self._batches, self._task.search.prepared.metric))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def loss(self, widths: Widths, *, whole: bool = False) -> Judged:
        """Return the loss of a candidate; one that an earlier run has judged is not judged again.

        Args:
            widths: of the candidate.
            whole: judge on all samples, also if the fit to one half alone shows that the limit is exceeded.
        """
        made = functools.partial(self._judged, widths, math.inf if whole else self._task.limit)
        loss, self._backward = self._task.search.job.steps.alone().once(judging(key_of(widths)), made, JUDGED)
        return loss

    def _judged(self, widths: Widths, limit: float) -> tuple[Judged, bool]:
        """Return the loss of a candidate, and True if the last fold lost more than the first one.

        That fold judges the next candidate first: where few samples lose much, they are the same in many candidates.
        """
        folds = self._folds[::-1] if self._backward else self._folds
        fits = [(functools.partial(self._task.made, fold.fitted, widths), fold.judges) for fold in folds]
        loss = self._task.loss(self._judge, *fits, limit=limit)
        backward, first = self._backward, len(folds[0].judges) * self._batches.samples // len(self._batches)
        if len(folds) > 1 and len(loss.values) == self._batches.samples and not self._judge.own:
            backward ^= bool(loss.values[first:].mean() > loss.values[:first].mean())
        return judged_of(loss), backward


def judge_of(task: Task, batches: Batches, metric: Metric | None = None, *, brief: bool = False) -> Judge:
    """Return a judge that shares what is known of the original's outputs with the others of the task.

    Args:
        task: see `Task`.
        batches: the feeds that judge.
        metric: the user's own loss; blocks alone are judged by the kinds of the outputs, which change smoothly.
        brief: leave out agreements.
    """
    known_of(task)
    prepared, providers = task.search.prepared, task.search.recipe.providers
    return Judge(prepared.model, batches, providers, metric, brief=brief, outputs=task.outputs)


def known_of(task: Task) -> dict[str, tuple[Part, ...]]:
    """Return the content of the original's outputs, detected on the samples that judge candidates and the result."""
    prepared = task.search.prepared
    if not task.outputs.known:
        every = folds_of(prepared)[0] if task.judged else prepared.batches
        with Judge(prepared.model, every, task.search.recipe.providers, outputs=task.outputs) as judge:
            judge.detect()
    return task.outputs.known


def loss_of(prepared: Prepared, model: ir.Model, providers: Sequence[str]) -> Judged:
    """Return the loss of a result on the samples that judge candidates, also if its fits have seen them."""
    batches, _ = folds_of(prepared)
    with Judge(prepared.model, batches, providers, prepared.metric) as judge:
        return judged_of(judge.loss((model, range(len(batches)))))


def folds_of(prepared: Prepared) -> tuple[Batches, list[Fold]]:
    """Return the feeds that judge, and the folds.

    Raises:
        DataError: there is only one feed.
    """
    if prepared.held_out is not None:
        batches = prepared.held_out.batches
        return batches, [Fold(prepared, tuple(range(len(batches))))]
    batches, count = prepared.batches, len(prepared.batches)
    check_halves(batches)
    halves = [tuple(range(start, count, 2)) for start in (0, 1)]
    return batches, [Fold(_part(prepared, halves[1 - n]), halves[n]) for n in (0, 1)]


def _part(prepared: Prepared, numbers: tuple[int, ...]) -> Prepared:
    batches = prepared.batches
    return replace(prepared, batches=part_of(batches, [batches.feeds[number] for number in numbers]))


def key_of(widths: Widths) -> str:
    """Return the key of some widths in the folder of a run that can be continued."""
    return hashlib.sha256(json.dumps(widths, sort_keys=True).encode()).hexdigest()[:16]


def judging(key: str) -> str:
    """Return the name of the step that judges a candidate, by the key of its widths."""
    return f"loss {key}"
