"""Finds the widths that cost least within a loss: losses of single blocks, a path of nested widths, candidates on it.

Every candidate is decided and fitted as the final model is, and judged on samples that it was not fitted to: on
held-out samples, or, if the data are too few to hold some back, by two halves that judge each other's fits.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from onnxgrail.allocation.found import Candidate, Found, Judged, judged_of
from onnxgrail.allocation.ladders import Ladder
from onnxgrail.allocation.losses import Search, evidence
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import part_of
from onnxgrail.calibration.judge import Judge
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.core import Change, View
from onnxgrail.errors import DataError
from onnxgrail.fidelity.loss import Loss
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.progress import ticking
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.search.bisect import farthest
from onnxgrail.search.harms import Harm, Tried, harm_from, harm_of, power_of
from onnxgrail.search.path import Cost, Path, Widths, path_of

SEEN = 64  # samples on which single blocks are tried
BEYOND = 3.0  # times the limit: predicted loss at which the path ends
SLACK = 0.02  # the same, added: predictions of small losses are far off
NEXT = 2.0  # times the limit: the larger loss whose cost is told
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


def within(task: Task) -> tuple[Widths, Found]:
    """Return the widths of lowest cost whose loss is within the limit, and how they were found.

    Args:
        task: see `Task`.

    Raises:
        DataError: no samples can judge a candidate.
    """
    path = _path(task)
    batches, folds = _folds(task.search.prepared)
    tried: list[Candidate] = []
    tick = ticking(task.search.job.progress, "searching", 5)
    started, budget = time.monotonic(), task.search.job.recipe.budget_seconds
    with ExitStack() as stack:
        judge = stack.enter_context(_judge(task, batches))

        def bound(steps: int) -> float:
            widths = path.widths(steps)
            loss = task.search.job.steps.alone().once(_key(widths), lambda: _judged(task, judge, folds, widths), JUDGED)
            tried.append(Candidate(steps=steps, cost=path.cost(steps), predicted=path.loss(steps), loss=loss))
            tick()
            return loss.bound

        late = (lambda: False) if budget is None else (lambda: time.monotonic() - started > budget)
        best = farthest(path, task.limit, bound, late) if len(path) else 0
    return path.widths(best), _found(task, path, tried, best, crossed=len(folds) > 1)


def _path(task: Task) -> Path:
    """Return the path of least harm, from the losses of all blocks alone."""
    search, steps = task.search, task.search.job.steps.alone()
    prepared = search.prepared
    ladders = {ladder.name: ladder for ladder in search.ladders}
    tick = ticking(task.search.job.progress, "trying blocks", len(ladders))
    nothing = weights.empty(prepared.survey)
    with Judge(prepared.model, _some(prepared.batches), task.search.recipe.providers) as judge:
        every = range(len(_some(prepared.batches).feeds))

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
    return path_of(harms, task.cost, power_of(harms), BEYOND * task.limit + SLACK)


def _judge(task: Task, batches: Batches) -> Judge:
    """Return the judge of candidates; blocks alone are judged by the kinds of the outputs, which change smoothly."""
    prepared = task.search.prepared
    return Judge(prepared.model, batches, task.search.recipe.providers, prepared.metric)


def _some(batches: Batches) -> Batches:
    """Return feeds with about `SEEN` samples, spread over all."""
    each = max(1, batches.samples // max(len(batches), 1))
    count = min(len(batches), math.ceil(SEEN / each))
    return part_of(batches, [batches.feeds[(2 * n + 1) * len(batches) // (2 * count)] for n in range(count)])


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


def _judged(task: Task, judge: Judge, folds: list[_Fold], widths: Widths) -> Judged:
    """Decide, fit and judge a candidate."""
    prepared = task.search.prepared
    return told(judge.loss(*((narrowed(prepared, task.settle(f.fitted, widths)), f.judges) for f in folds)))


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


def _found(task: Task, path: Path, tried: list[Candidate], best: int, *, crossed: bool) -> Found:
    """Return the report of the search."""
    chosen = next((n for n, one in enumerate(tried) if one.steps == best), None)
    cheapest = path.steps[0] if len(path) else None
    following = path.reach(NEXT * path.loss(best)) if chosen is not None else best
    more = following > best
    return Found(
        limit=task.limit,
        minimize=task.minimize,
        before=path.before,
        cost=path.cost(best),
        crossed=crossed,
        tried=tuple(tried),
        chosen=chosen,
        next_limit=NEXT * task.limit if more else None,
        next_cost=path.cost(following) if more else None,
        cheapest=None if cheapest is None else (cheapest.block, cheapest.width, path.full[cheapest.block]),
    )
