"""Decide blocks on statistics of the dense network, or in closed loop of the network as decided so far."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.calibration.stream.dense import by_block, size_of
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.core import Block, Stats
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.memory import Pile
from onnxgrail.machine.progress import Tick, ticking
from onnxgrail.narrowing import norms
from onnxgrail.narrowing.best import sweep
from onnxgrail.narrowing.choosing import Run, needs_data, room
from onnxgrail.narrowing.order import Step, closed_steps, open_steps

TOGETHER = 2**27  # bytes of second moments that one step of an open loop measures


def settle(run: Run, blocks: Sequence[Block]) -> float:
    """Decide every block, with statistics of activations if a method needs them.

    Args:
        run: the decisions so far; it receives the new ones.
        blocks: the blocks to narrow, in network order.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    if run.recipe.compensate == BEST:
        return sweep(run, blocks)
    if needs_data(run.recipe):
        return _measured(run, blocks)
    for block in blocks:
        run.settle(run.known(block) or run.choose(block, ()))
    return 0.0


def _measured(run: Run, blocks: Sequence[Block]) -> float:
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
    with stream_of(prepared, recipe, job.group) as stream:
        tick = ticking(job.progress, "calibrating", len(stream.shard.numbers) * len(todo))
        for step in todo:
            limit = step.limit if len(todo) > 1 else None
            _step(run, stream, step, run.ledger if recipe.closed_loop else untouched, limit, tick)
            pile.add(sum(room(block, prepared) for block in step.blocks))
        return stream.forward


def _step(run: Run, stream: Stream, step: Step, before: Ledger, limit: int | None, tick: Tick) -> None:
    """Measure the blocks of a step in the network `before` and decide them.

    This is a function of its own so that the arrays of a step are freed when it returns.
    """
    known = [run.known(b) for b in step.blocks]
    wanted = [run.probes(b) for b in step.blocks]
    probes = [p for some in wanted for p in some]
    measured: Sequence[tuple[Stats, ...]] = [()] * len(step.blocks)
    if run.dense is not None and not before.dead.any():  # nothing is narrowed yet: the stream need not move
        measured = measured if all(known) else [run.dense[b.name] for b in step.blocks]
    elif all(known):
        stream.skip(probes, before, tick, limit)
    else:
        measured = by_block(wanted, stream.measure(probes, before, tick, limit))
    run.take(step.blocks, known, measured, stream, before)


def bring_back(run: Run) -> float:
    """Correct scales and biases so that activations match the dense network's, as `recipe.norms` says.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    if run.recipe.norms == "none" or not run.changes:
        return 0.0
    run.ledger, run.norms, seconds = norms.bring_back(run.prepared, run.job, run.ledger, run.changes)
    return seconds
