"""Blocks are settled one by one: measured behind what is decided already, decided, written into the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.calibration.prepare import stream_of
from onnxgrail.calibration.stream.dense import by_block, size_of
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Block, Probe, Stats
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.group.sums import shard_of
from onnxgrail.machine.memory import Pile
from onnxgrail.machine.progress import Tick, ticking
from onnxgrail.narrowing import norms
from onnxgrail.narrowing.best import sweep
from onnxgrail.narrowing.choosing import Backlog, Run, needs_data, room
from onnxgrail.narrowing.order import Step, closed_steps, open_steps

TOGETHER = 2**27  # bytes of second moments that one step of an open loop measures


def settle(run: Run, blocks: Sequence[Block]) -> float:
    """Settle every block, on statistics where some method needs them; returns seconds inside ONNX Runtime."""
    if run.recipe.compensate == BEST:
        return sweep(run, blocks)
    if needs_data(run.recipe):
        return _measured(run, blocks)
    for block in blocks:
        run.settle(run.known(block) or run.choose(block, ()))
    return 0.0


def _measured(run: Run, blocks: Sequence[Block]) -> float:
    """Settle every block on statistics of the dense network, or in closed loop of the network as decided so far.

    Where decisions are known already, nothing is measured, and the stream follows when it is needed again.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    prepared, recipe, job = run.prepared, run.recipe, run.job
    together = 0 if in_files(prepared.model) else TOGETHER  # a step also holds the weights that it runs
    todo = closed_steps(blocks) if recipe.closed_loop else open_steps(blocks, size_of, together)
    feeds = len(shard_of(job.group, len(prepared.batches)).numbers)
    tick = ticking(job.progress, "calibrating", feeds * len(todo))
    untouched = weights.empty(prepared.survey)
    pile = Pile(heavy=bool(in_files(prepared.model)))
    with stream_of(prepared, recipe, job.group) as stream:
        walk = _Walk(stream, feeds, tick, moving=len(todo) > 1)
        for step in todo:
            _step(run, walk, step, run.ledger if recipe.closed_loop else untouched)
            pile.add(sum(room(block, prepared) for block in step.blocks))
        return stream.forward


class _Walk:
    """The stream, brought to a step when that has to be measured: in the very runs that measured the ones before."""

    def __init__(self, stream: Stream, feeds: int, tick: Tick, *, moving: bool) -> None:
        self.stream, self.tick, self._moving = stream, tick, moving
        self._backlog = Backlog(feeds, tick)

    def skip(self, step: Step, ledger: Ledger) -> None:
        """Leave out a step whose decisions are known."""
        self._backlog.skip(lambda: self.stream.walk_past(_probes(step), ledger, step.limit))

    def measure(self, step: Step, ledger: Ledger) -> list[tuple[Stats, ...]]:
        """Statistics of the blocks of a step."""
        self._backlog.catch_up()
        found = self.stream.measure(_probes(step), ledger, self.tick, step.limit if self._moving else None)
        return by_block(step.blocks, found)


def _probes(step: Step) -> list[Probe]:
    return [p for b in step.blocks for p in b.probes]


def _step(run: Run, walk: _Walk, step: Step, before: Ledger) -> None:
    """Measure blocks in the network `before` and settle them; a function, so that a step's arrays end with it."""
    known = [run.known(b) for b in step.blocks]
    measured: Sequence[tuple[Stats, ...]] = [()] * len(step.blocks)
    if run.dense is not None and not before.dead.any():  # nothing is narrowed yet: the stream need not be there
        measured = measured if all(known) else [run.dense[b.name] for b in step.blocks]
    elif all(known):
        walk.skip(step, before)
    else:
        measured = walk.measure(step, before)
    run.take(step.blocks, known, measured, walk.stream, before)


def bring_back(run: Run) -> float:
    """Bring activations back to the dense network's, as the recipe says; returns seconds inside ONNX Runtime."""
    if run.recipe.norms == "none" or not run.changes:
        return 0.0
    run.ledger, run.norms, seconds = norms.bring_back(run.prepared, run.job, run.ledger, run.changes)
    return seconds
