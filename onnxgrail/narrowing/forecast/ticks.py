"""Progress of calibration: batches, decisions and fits count by the time that they are expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Block
from onnxgrail.machine.progress import Tick, weighted
from onnxgrail.narrowing.choosing import Run
from onnxgrail.narrowing.forecast.speed import Speed, rough
from onnxgrail.narrowing.forecast.work import Work, of_fit, of_grail, of_statistics
from onnxgrail.narrowing.layers import Stage
from onnxgrail.narrowing.order import Step, Turn
from onnxgrail.narrowing.two_networks import Pair

STAGE = "calibrating"


def for_steps(run: Run, steps: Sequence[Step], stream: Stream) -> Tick:
    """Return a function to call once per batch of every step, and once per block that is decided after it.

    Args:
        run: the decisions so far.
        steps: blocks that are measured together.
        stream: what measures them.
    """
    road, speed, costs, feeds = _Road(run, stream), rough(), list[float](), len(stream.shard.numbers)
    for step in steps:
        walked = road.walk(_read(run, step.blocks), step.limit)
        costs += _of_blocks(run, speed, step.blocks, walked, feeds)
    return weighted(run.job.progress, STAGE, costs)


def for_turns(run: Run, turns: Sequence[Turn[Stage]], pair: Pair) -> Tick:
    """Return a function to call once per batch and per decision of every turn, and per batch and fit of its layers.

    Args:
        run: the decisions so far.
        turns: blocks that are decided together, with the layers that are fitted next.
        pair: the streams of the dense and of the narrowed network.
    """
    dense, narrow, speed, costs = _Road(run, pair.dense), _Road(run, pair.narrow), rough(), list[float]()
    feeds = len(pair.dense.shard.numbers)
    for turn in turns:
        goals = [goal for stage in turn.layers for goal in stage.goals]
        walked = dense.walk([*_read(run, turn.blocks), *goals], turn.limit)
        if turn.blocks:
            costs += _of_blocks(run, speed, turn.blocks, walked, feeds)
            walked = 0.0
        for stage in turn.layers:
            there = narrow.walk([stage.first.source], stage.first.position)
            work = of_fit(run.prepared, stage) + Work(sums=walked + there)
            costs += _batches(speed, work, feeds)
            costs.append(speed.seconds(Work(solves=work.solves, steps=1.0)))
            walked = 0.0
    return weighted(run.job.progress, STAGE, costs)


def _of_blocks(run: Run, speed: Speed, blocks: Sequence[Block], walked: float, feeds: int) -> list[float]:
    """Return the seconds of each batch, and of each decision that follows."""
    found = [of_statistics(run.prepared, run.recipe, block) for block in blocks]
    costs = _batches(speed, sum(found, Work(sums=walked)), feeds)
    for block, work in zip(blocks, found, strict=True):
        share = run.kept[block.name] / block.units
        fit = Work() if block.name in run.fitted else of_grail(run.prepared, run.recipe, block, share)
        costs.append(speed.seconds(Work(sums=fit.sums, solves=work.solves + fit.solves, steps=1.0)))
    return costs


def _batches(speed: Speed, work: Work, feeds: int) -> list[float]:
    """Return the seconds of each batch: runs and sums over rows, without solves."""
    return [speed.seconds(replace(work, solves=0.0, steps=0.0)) / max(feeds, 1)] * feeds


def _read(run: Run, blocks: Sequence[Block]) -> list[str]:
    """Return the tensors that the decisions about blocks read."""
    return [probe.value for block in blocks for probe in run.probes(block)]


class _Road:
    """The nodes that a stream runs, and their operations as products of matrices over all samples."""

    def __init__(self, run: Run, stream: Stream) -> None:
        self._work, self._index, self._at = stream.lives.work, stream.index, stream.position
        self._scale = 2 * run.prepared.batches.samples / run.prepared.samples

    def walk(self, names: Sequence[str], then: int) -> float:
        """Return the operations that compute tensors; the stream goes on at the node at `then`."""
        first, self._at = self._at, max(then, self._at)
        makers = [self._index.values[name].producer() for name in names if name in self._index.values]
        last = max([self._at, *(self._index.order[node] + 1 for node in makers if node is not None)])
        return float(self._scale * (self._work[last] - self._work[first]))
