"""The network as rounded so far beside the one that it should follow, and the layers to round in their order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.calibration.streaming import starts_of, stream_of
from onnxgrail.core import Array, Bools, Recipe
from onnxgrail.graph.fittable.consumers import Consumer, biased, consumers, unmarked
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.machine.amounts import cache_for, fit_bytes
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.narrowing.bits.stage import least
from onnxgrail.narrowing.layers import Stage, Task, has_room, stages_of
from onnxgrail.narrowing.two_networks import Pair, Targets


def own(prepared: Prepared, slim: ir.Model, facts: Facts) -> Prepared:
    """Return the narrowed model as a prepared model of its own, without blocks, whose weights can be replaced."""
    survey = Survey(blocks=(), refusals=(), facts=facts, marks={}, operands={}, ids=1)
    survey = replace(survey, operands=unmarked(slim, survey))
    batches, feed = prepared.fed(slim), prepared.fed_small(slim)
    return replace(prepared, model=slim, survey=survey, batches=batches, feed=feed, routes={}, gradients={})


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """The dense network seen from the narrowed one.

    Attributes:
        prepared: the dense model.
        ledger: the decisions that narrowed it.
        averaged: units were merged, so that what is left of a tensor is not a part of the dense one.
        places: positions of its nodes, by key.
        targets: keeps what its layers compute for other narrowed networks, too; None if there are no others.
    """

    prepared: Prepared
    ledger: Ledger
    averaged: bool
    places: dict[str, int]
    targets: Targets | None

    @classmethod
    def of(cls, prepared: Prepared, ledger: Ledger, recipe: Recipe, targets: Targets | None = None) -> Guide:
        """Return the guide of a narrowing."""
        places = {key(node): place for place, node in enumerate(prepared.model.graph)}
        return cls(prepared, ledger, not REDUCERS[recipe.reducer].needs_scores, places, targets)

    def made(self, task: Task) -> Bools | None:
        """Return which outputs of the dense layer are left, None if its outputs cannot be compared.

        They cannot if the dense network has no tensor of that name, if other axes were narrowed, or if outputs were
        averaged.
        """
        survey, name = self.prepared.survey, task.goal
        if task.consumer.node not in self.places or name not in survey.facts.shapes:
            return None
        shape = survey.facts.shapes[name]
        if task.consumer.made >= len(shape):
            return None
        left = np.ones(shape[task.consumer.made], dtype=bool)
        for mark in survey.marks.get(name, ()):
            gone = self.ledger.dead[mark.labels]
            if gone.any() and (self.averaged or mark.axes != (task.consumer.made,)):
                return None
            left &= ~gone if gone.any() else True
        return left if int(left.sum()) == task.outputs else None

    def stage(self, stage: Stage) -> tuple[Stage, int] | None:
        """Return the stage with the outputs that are left of the dense layers, and where they begin; or None."""
        found = [self.made(task) for task in stage.tasks]
        if any(made is None for made in found):
            return None
        tasks = tuple(_towards(task, made) for task, made in zip(stage.tasks, found, strict=True) if made is not None)
        return Stage(tasks), self.places[stage.first.node]

    def known(self, todo: Iterable[Stage]) -> Sequence[Mapping[str, Array]]:
        """Return per batch what the dense layers of some stages compute, if it is kept."""
        if self.targets is None:
            return ()
        found = [there[0] for stage in todo if (there := self.stage(stage)) is not None]
        return self.targets.of(self.prepared, [name for stage in found for name in stage.goals])


def _towards(task: Task, made: Bools) -> Task:
    bias = np.zeros(len(made))
    bias[made] = task.consumer.bias
    return replace(task, made=made, consumer=replace(task.consumer, bias=bias))


def stages(slim: Prepared, recipe: Recipe, nodes: Container[str]) -> list[Stage]:
    """Return the matrices whose inputs have second moments, those together that read the same rows and fit into memory.

    Args:
        slim: the narrowed model.
        recipe: the cache size, see `fit_bytes`.
        nodes: keys of the nodes with matrices to round.
    """
    limit = fit_bytes(recipe)
    found = [c for c in consumers(slim.model, slim.survey) if c.node in nodes]
    nodes_in_order, facts = list(slim.model.graph), slim.survey.facts
    together = stages_of([_task(_with_bias(c, nodes_in_order[c.position], facts), facts, recipe) for c in found])
    return [part for stage in together for part in _parts(stage, limit)]


def too_large(stage: Stage) -> str:
    """Return the reason why a stage that exceeds the memory is not measured, with the option that allows it."""
    taken = f"{stage.memory / 2**30:.1f} GiB"
    return f"this could take {taken} of memory, which --cache-budget {cache_for(stage.memory)} allows"


def _parts(stage: Stage, limit: int) -> list[Stage]:
    """Return the stage, or parts of it, each of as many layers as fit into the memory, but at least one.

    Layers each of which exceeds the memory are together as far as their `least` fits.
    """
    parts: list[Stage] = []
    for task in stage.tasks:
        longer = Stage((*parts[-1].tasks, task)) if parts else None
        large = longer is not None and min(parts[-1].memory, Stage((task,)).memory) > limit
        if longer is not None and (least(longer) if large else longer.memory) <= limit:
            parts[-1] = longer
        else:
            parts.append(Stage((task,)))
    return parts


def _with_bias(consumer: Consumer, node: ir.Node, facts: Facts) -> Consumer:
    """Return a layer that is compared after the bias is added: narrowing may have changed the bias."""
    conv = consumer.window is not None
    last, bias = biased(node.outputs[0], facts, facts.shapes[consumer.value][consumer.outward], conv=conv)
    if consumer.total or consumer.inner or bias is None:
        return consumer
    return replace(consumer, output=last.name or "", bias=bias)


def _task(consumer: Consumer, facts: Facts, recipe: Recipe) -> Task:
    shape = facts.shapes[consumer.value]
    kept, made = (np.ones(shape[axis], dtype=bool) for axis in (consumer.inward, consumer.outward))
    room = consumer.has_bias and has_room(consumer, recipe)
    consumer = replace(consumer, plain=False)  # so that targets are summed, not products with the dense input
    return Task(consumer=consumer, kept=kept, made=made, affine=room)


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """The streams of a run: the dense network, the narrowed one in float, and the one that is being rounded.

    Attributes:
        slim: the narrowed model.
        untouched: its ledger before any rounding.
        dense, itself: the dense network, or the narrowed one in float, beside the one that is being rounded.
    """

    guide: Guide
    slim: Prepared
    untouched: Ledger
    dense: Pair
    itself: Pair

    def pair(self, stage: Stage) -> tuple[Pair, Stage, int]:
        """Return the networks to compare for a stage, the stage as they have it, and where the first one may go."""
        found = self.guide.stage(stage)
        return (self.itself, stage, stage.first.position) if found is None else (self.dense, *found)


@contextmanager
def opened(guide: Guide, slim: Prepared, todo: Sequence[Stage], recipe: Recipe) -> Iterator[Sides]:
    """Give the streams over the calibration data.

    Args:
        guide: the dense model.
        slim: the narrowed model, as `own` returns it.
        todo: what will be rounded.
        recipe: providers, seed and cache size.
    """
    prepared, known = guide.prepared, guide.known(todo)
    with ExitStack() as stack:
        streams: list[Stream] = [stack.enter_context(stream_of(one, recipe, share=3)) for one in (prepared, slim, slim)]
        empty: Sequence[Ledger] = [weights.empty(one.survey) for one in (prepared, slim)]
        dense, itself, rounded = streams
        starts = starts_of(rounded, Steps())
        yield Sides(
            guide=guide,
            slim=slim,
            untouched=empty[1],
            dense=Pair(dense, rounded, empty[0], starts, recipe.seed, known),
            itself=Pair(itself, rounded, empty[1], starts, recipe.seed),
        )
