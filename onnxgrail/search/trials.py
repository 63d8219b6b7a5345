"""Measures the harm of narrowing each block, and what later fits repair of it, for the path that a search follows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.allocation.ladders import Ideal, Ladder, Widths
from onnxgrail.allocation.losses import Way, evidence
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import chosen, part_of, spread
from onnxgrail.calibration.judge import Judge, Outputs
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.core import Change, Floats, Kind, View
from onnxgrail.graph.cost import counting
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.progress import Tick, ticking
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.search.begun import recorded
from onnxgrail.search.bits import harms_of_bits, split, step_of
from onnxgrail.search.candidates import Settle, Task, folds_of, judge_of, key_of, known_of
from onnxgrail.search.harms import Harm, Near, Tried, harm_from, harm_of, power_of
from onnxgrail.search.path import Path, Paths, schedule_of
from onnxgrail.search.repairs import Plan, repaired, runs_alongside

LEAST, MOST = 8, 64  # samples on which single blocks are tried
HEAVY, FEWEST = 2e12, 2  # multiply-accumulates from which on all these trials have fewer samples, but this many
JUDGED = 1000  # multiply-accumulates that take as long as judging one number of an output (25 to 90 ns measured)
PASSES, MACS = 5, 1e11  # over the data, or multiply-accumulates if that is more, that all these trials may take
RUNS, SHARE, FEW = 1.0, 8, 64  # runs that fits may take, each to one sample in `SHARE`, but no fewer than `FEW`
FITTED = 6  # most blocks that are tried with fits
PARTS: tuple[Kind, ...] = ("rank", "qk", "vo")  # blocks inside one layer, of which fits leave another share
Content = Callable[[], Floats]
"""Returns the content of each feed, which takes a run of the original model."""
HARM: Codec[Harm] = Codec(lambda harm: Record(notes=asdict(harm)), lambda record: harm_from(record.notes))
LOSSES: Codec[Floats] = Codec(lambda losses: Record(arrays={"losses": losses}), lambda record: record.arrays["losses"])
SHARED: Codec[float] = Codec(lambda share: Record(notes={"share": share}), lambda record: float(record.notes["share"]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """The data of groups: a part to fit to, the feeds that judge with their numbers, and the number of groups."""

    fitted: Prepared
    batches: Batches
    judges: tuple[int, ...]
    trials: int


def paths_within(task: Task, most: float = math.inf, parts: Parts | None = None) -> Paths:
    """Return the paths of least harm, from the losses of all blocks alone and of a few blocks after fits.

    Args:
        task: see `Task`.
        most: predicted loss at which a path ends.
        parts: the data for trials with fits if they are made already.

    Raises:
        DataError: no samples can judge a trial.
    """
    blocks, weighed = len(task.search.ladders), len(task.search.rungs)
    fits = task.decide is not None and blocks and task.judged
    parts = (parts or parts_of(task.search.prepared)) if fits else None
    trials = blocks + weighed + (0 if parts is None else tries(task, parts))
    tick = ticking(task.search.job.progress, "trying blocks", trials)
    content = functools.cache(lambda: _content(task))
    harms = _alone(task, content, tick) if blocks else []
    power = power_of(harms)
    if parts is not None and task.decide is not None and blocks:
        harms = _fitted(task, task.decide, harms, parts, tick)
    harms += _of_bits(task, content, tick)
    power = power if blocks else power_of(harms)

    return Paths(tuple(harms), task.cost, power, most)


def together_near(task: Task, limit: float, parts: Parts | None = None) -> list[Way]:
    """Return the bits on the path of least harm where its cost is within a limit, and the schedule of its widths.

    If it narrows blocks, the bits on the path of weights alone follow, without a schedule if they suffice: losses of
    single blocks are small and add up to more than their sum where blocks depend on each other. If layers become two,
    the path on which they stay one follows.
    """
    paths = paths_within(task, parts=parts)
    first, widths = _way(paths.without(), limit)
    if not task.search.narrows(widths):
        return [first]
    alone = paths.without([ladder.name for ladder in task.search.ladders])
    (bits, _), _ = _way(alone, limit)
    ways = [first, (bits, None if alone.cost(len(alone)) <= limit else first[1])]
    pairs = [ladder for ladder in task.search.ladders if ladder.pair]
    if any(widths[ladder.name] < ladder.units for ladder in pairs):
        ways.append(_way(paths.without([ladder.name for ladder in pairs]), limit)[0])
    return ways


def _way(path: Path, limit: float) -> tuple[Way, Widths]:
    """Return the bits on a path where its cost is within a limit, its schedule of widths, and the widths there."""
    place = next((n for n in range(len(path) + 1) if path.cost(n) <= limit), len(path))
    widths = dict(path.full)
    for step in path.steps[:place]:
        del widths[step.block]  # so that the last step is the last one in order
        widths[step.block] = step.width
    blocks, bits = split(widths)
    full, _ = split(path.full)
    steps = tuple(step for step in path.steps if step.block in full)
    return (bits, schedule_of(replace(path, full=full, steps=steps))), blocks


def schedule_near(task: Task, parts: Parts | None = None) -> Ideal:
    """Return the schedule that follows the path of least harm; see `paths_within`."""
    return schedule_of(paths_within(task, parts=parts).without())


def losses_of(task: Task, candidates: Sequence[Widths], parts: Parts) -> Generator[Floats, None, None]:
    """Yield the loss per sample of candidates that are decided and fitted on a part of the data, without these.

    Their weights have the bits that stand among the widths.
    """
    prepared, steps = task.search.prepared, task.search.job.steps.alone()
    tick = ticking(task.search.job.progress, "comparing", len(candidates))
    with judge_of(task, parts.batches, prepared.metric, brief=True) as judge:

        def losses(widths: Widths) -> Floats:
            fit = functools.partial(task.made, parts.fitted, widths), parts.judges
            return np.asarray(task.loss(judge, fit).values, np.float64)

        for widths in candidates:
            yield steps.once(f"compared {key_of(widths)}", functools.partial(losses, widths), LOSSES)
            tick()


def _alone(task: Task, content: Content, tick: Tick) -> list[Harm]:
    """Return the losses of all blocks alone, without fits of other layers.

    Only the nodes from a block on are run: what the original computes before them stays in memory.
    """
    search, steps = task.search, task.search.job.steps.alone()
    prepared = search.prepared
    ladders = {ladder.name: ladder for ladder in search.ladders}
    nothing = weights.empty(prepared.survey)
    part = replace(prepared, batches=_some(prepared, len(ladders), task.near, content))
    every = range(len(part.batches))
    with (
        judge_of(task, part.batches, brief=True) as judge,
        stream_of(part, search.recipe) as stream,
    ):

        def trial(change: Change) -> Tried:
            ledger = weights.record(change, prepared.model, prepared.survey, nothing)
            loss = judge.loss_of([nullcontext(recorded(part, judge, stream, ledger, every))], every)
            return loss.mean, loss.kind

        def read(view: View) -> Harm:
            ladder: Ladder = ladders[view.block.name]
            stream.advance(nothing, view.block.span[0])

            def cost(width: int) -> float:
                return task.cost({ladder.name: width})

            make = functools.partial(harm_of, view, ladder, search.narrow, trial, task.near, cost)
            harm = steps.once(f"harm {ladder.name}", make, HARM)
            tick()
            return harm

        found = evidence(search, read)
    return [found[ladder.name] for ladder in search.ladders]


def _of_bits(task: Task, content: Content, tick: Tick) -> list[Harm]:
    """Return the losses of all weights alone in fewer bits."""
    search, steps = task.search, task.search.job.steps.alone()
    if not search.rungs:
        return []
    prepared = search.prepared.undivided()
    some = _some(prepared, len(search.rungs), replace(task.near, share=0.0), content)
    found = []
    outputs = Outputs(known_of(task))
    with Judge(prepared.model, some, search.recipe.providers, brief=True, outputs=outputs) as judge:

        def trial(slim: ir.Model) -> Tried:
            loss = judge.loss((slim, range(len(some))))
            tick()
            return loss.mean, loss.kind

        for rung, make in zip(search.rungs, harms_of_bits(prepared, search.rungs, trial), strict=True):
            found.append(steps.once(f"harm {step_of(rung.weight)}", make, HARM))
    return found


def _fitted(task: Task, decide: Settle, harms: Sequence[Harm], parts: Parts, tick: Tick) -> list[Harm]:
    """Return the losses of all blocks after fits, of which some blocks show the share that is left.

    Args:
        task: see `Task`.
        decide: decides a model without fits of other layers.
        harms: losses of all blocks alone.
        parts: the data.
        tick: counts the blocks that are tried with fits.
    """
    prepared, steps = task.search.prepared, task.search.job.steps.alone()
    full = {harm.block: harm.units for harm in harms}
    with judge_of(task, parts.batches, brief=True) as judge:

        def left(block: str, width: int) -> float:
            def share() -> float:
                ledgers = (settle(parts.fitted, full | {block: width}) for settle in (task.settle, decide))
                after, before = (
                    task.loss(judge, (functools.partial(task.decided, one), parts.judges)).mean for one in ledgers
                )
                return after / before if before > 0 else 1.0

            found = steps.once(f"fitted {block}", share, SHARED)
            tick()
            return found

        nodes = len(prepared.model.graph)
        apart = frozenset(block.name for block in task.search.blocks if runs_alongside(block, nodes))
        plan = Plan(tries(task, parts), apart, _sorts(task))
        return repaired(harms, plan, power_of(harms), task.near, left)


def _sorts(task: Task) -> dict[str, str]:
    """Return the sorts of blocks that are tried by themselves: those inside one layer."""
    return {block.name: block.kind for block in task.search.blocks if block.kind in PARTS}


def tries(task: Task, parts: Parts) -> int:
    """Return the number of blocks to try with fits: for a target each sort in full, since no candidates follow."""
    sorts = 1 + len({*_sorts(task).values()})
    return parts.trials * (sorts if task.near.share else 1)


def parts_of(prepared: Prepared) -> Parts:
    """Return data for trials with fits, so few that all of them take `RUNS` at most.

    Raises:
        DataError: no samples can judge a trial.
    """
    judging, folds = folds_of(prepared)
    batches, judges = folds[0].fitted.batches, folds[0].judges
    if len(folds) == 1 and judging.samples < FEW and len(batches) > 1:  # so few say little: half of the rest judges too
        rest = part_of(batches, batches.feeds[1::2])
        batches = part_of(batches, batches.feeds[::2])
        judging = replace(judging, feeds=judging.feeds + rest.feeds, samples=judging.samples + rest.samples)
        judges = tuple(range(len(judging)))
    wanted = min(batches.samples, max(FEW, prepared.batches.samples // SHARE))
    part = part_of(batches, spread(batches, max(1, math.ceil(len(batches) * wanted / max(batches.samples, 1)))))
    count = min(FITTED, math.floor(RUNS * prepared.batches.samples / max(part.samples, 1)))
    return Parts(fitted=replace(prepared, batches=part), batches=judging, judges=judges, trials=count)


def _content(task: Task) -> Floats:
    """Return (feeds,) the content of each feed; see `Judge.content`."""
    with judge_of(task, task.search.prepared.batches, brief=True) as judge:
        return judge.content()


def judged_macs(prepared: Prepared) -> float:
    """Return the multiply-accumulates of a sample, with those that take as long as judging its outputs."""
    return (counting.macs(prepared.model, prepared.survey) + JUDGED * _numbers(prepared)) / prepared.samples


def wanted(samples: int, macs: float, trials: int) -> float:
    """Return the number of samples on which single blocks are tried.

    Args:
        samples: how many there are.
        macs: result of `judged_macs`.
        trials: number of trials.
    """
    least = min(max(HEAVY / max(macs * trials, 1.0), FEWEST), LEAST)
    return min(max(max(PASSES * samples, MACS / max(macs, 1.0)) / trials, least), MOST)


def _numbers(prepared: Prepared) -> int:
    """Return how many numbers the outputs of the observed samples have."""
    return sum(
        math.prod(prepared.survey.facts.shapes.get(value.name or "", ())) for value in prepared.model.graph.outputs
    )


def _some(prepared: Prepared, blocks: int, near: Near, content: Content) -> Batches:
    """Return feeds for the trials of single blocks: few enough not to take long, those with content."""
    batches, macs = prepared.batches, judged_macs(prepared)
    samples = wanted(batches.samples, macs, near.trials * max(blocks, 1))
    each = max(1, math.ceil(batches.samples / max(len(batches), 1)))  # the last feed may be shorter
    count = min(len(batches), math.ceil(samples / each))
    whole = count == len(batches) or macs * batches.samples > HEAVY
    return part_of(batches, spread(batches, count) if whole else chosen(batches, content(), count))
