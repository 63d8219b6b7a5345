"""Decide blocks on statistics of the dense network, or in closed loop of the network as decided so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxgrail.algebra.decide import needs_data
from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.stream.dense import by_block, size_of
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.core import Block, Stats
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.memory import Pile
from onnxgrail.machine.progress import Tick
from onnxgrail.narrowing import norms
from onnxgrail.narrowing.best import sweep
from onnxgrail.narrowing.choosing import Place, Run, room
from onnxgrail.narrowing.forecast.ticks import for_steps
from onnxgrail.narrowing.order import Deal, Step, closed_steps, open_steps

TOGETHER = 2**27  # bytes of second moments that one step of an open loop measures


def settle(run: Run, blocks: Sequence[Block], beginning: Beginning | None = None) -> float:
    """Decide every block, with statistics of activations if a method needs them.

    Args:
        run: the decisions so far; it receives the new ones.
        blocks: the blocks to narrow, in network order.
        beginning: a cut before all of them, where activations are known; None for the feeds.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    if run.recipe.compensate == BEST:
        return sweep(run, blocks, beginning)
    if needs_data(run.recipe):
        return _measured(run, blocks, beginning)
    for block in blocks:
        run.take([block], [run.known(block)], [()], Place(deal=Deal([[block]])))
    return 0.0


def _measured(run: Run, blocks: Sequence[Block], beginning: Beginning | None) -> float:
    """Decide every block on statistics of the dense network, or in closed loop of the network as decided so far.

    Steps whose decisions are cached are not measured. The stream catches up when the next step is measured.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    prepared, recipe, job = run.prepared, run.recipe, run.job
    heavy = bool(in_files(prepared.model))
    together = 0 if heavy else TOGETHER  # a step also holds the weights of the nodes that it runs
    todo = closed_steps(blocks) if recipe.closed_loop else open_steps(blocks, size_of, together)
    untouched = weights.empty(prepared.survey)
    pile = Pile(heavy=heavy)
    with stream_of(prepared, recipe, job.group, beginning=beginning) as stream:
        tick = run.tick = for_steps(run, todo, stream)
        for steps in _together(run, todo):
            limits = {step: step.limit if len(todo) > 1 else None for step in steps}
            _round(run, stream, limits, run.ledger if recipe.closed_loop else untouched, tick)
            pile.add(sum(room(block, prepared) for step in steps for block in step.blocks))
        return stream.forward


def _together(run: Run, todo: Sequence[Step]) -> list[Sequence[Step]]:
    """Return steps that are measured before their blocks are decided: with a block for each process in an open loop.

    A fold is measured at the place of its block, before the stream moves on.
    """
    folds = any(run.folds(step.blocks) for step in todo)
    count = 1 if run.recipe.closed_loop or folds else run.job.group.size
    return [todo[first : first + count] for first in range(0, len(todo), count)]


def _round(run: Run, stream: Stream, limits: Mapping[Step, int | None], before: Ledger, tick: Tick) -> None:
    """Measure the blocks of some steps in the network `before`, and decide them.

    This is a function of its own so that the arrays of the steps are freed when it returns.

    Args:
        run: the decisions so far.
        stream: moves on.
        limits: steps with the positions to which the stream moves; None if it stays.
        before: decisions in the network that is measured.
        tick: called once per batch.
    """
    blocks = [block for step in limits for block in step.blocks]
    known = [run.known(block) for block in blocks]
    there = run.dense is not None and not before.dead.any()  # nothing is narrowed yet: the stream need not move
    deal = run.deal(blocks, known, there=there)
    measured: list[tuple[Stats, ...]] = []
    for step, limit in limits.items():
        wanted = [run.probes(b) for b in step.blocks]
        probes = [p for some in wanted for p in some]
        cached = all(known[len(measured) : len(measured) + len(wanted)])
        if there and run.dense is not None:
            measured += [() if cached else run.dense[b.name] for b in step.blocks]
        elif cached:
            stream.skip(probes, before, tick, limit)
            measured += [()] * len(step.blocks)
        else:
            owners = [deal.of(block) for block, some in zip(step.blocks, wanted, strict=True) for _ in some]
            measured += by_block(wanted, stream.measure(probes, before, tick, limit, None, owners))
    run.take(blocks, known, measured, Place(deal=deal, stream=stream, before=before))


def bring_back(run: Run) -> float:
    """Correct scales and biases so that activations match the dense network's, as `recipe.norms` says.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    if run.recipe.norms == "none" or not run.changes:
        return 0.0
    run.ledger, run.norms, seconds = norms.bring_back(run.prepared, run.job, run.ledger, run.changes)
    return seconds
