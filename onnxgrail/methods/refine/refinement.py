"""What the refinements share: the two models, which batches are held out, and how far the outputs are apart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.fit.channelwise import narrowed
from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepare import Prepared
from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Array, Bools, Ints, Outcome, Recipe
from onnxgrail.fidelity import Sums, add_batch, finish, looks_like_logits, probable
from onnxgrail.graph.cuts.chunks import chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.io.mapped import weight_files
from onnxgrail.graph.rewrite.assign import assign
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.memory import give_back
from onnxgrail.machine.steps.steps import Steps

EVERY = 5  # batches: the last of so many is held out


@dataclass(frozen=True, kw_only=True, slots=True)
class Refined:
    """One fit, for the report.

    Attributes:
        block: the part of the network; kind: of refinement.
        before, after: error on held-out batches: squared, as a share of what the dense network has there; where `block`
            is the model and an output holds logits, the divergence in nats, to which distillation adds that share.
        epochs, seconds: what it took.
        added: what the model has now that it had not: `ic` gives form, place, rank, params and macs (per sample).
        outcome: `plain` where the weights stay because nothing better was found, `skipped` where nothing was tried.
    """

    block: str
    kind: str
    before: float | None
    after: float | None
    epochs: int
    seconds: float
    outcome: Outcome
    added: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Refinement:
    """The dense model as prepared and the narrowed one, whose initializers are written to.

    Attributes:
        ledger: what was decided; stand: which unit stands for each one.
        deadline: when to stop, on the clock of `time.perf_counter`; None for never.
        masks: per batch, which positions are real.
        facts: of the narrowed model, where it was not made from the dense one here.
        alias: names that tensors of the dense model have in such a narrowed one.
        few: numbers of the batches to learn from, where not all but the held-out ones are.
        steps: fits of a killed run, and of this one.
        real: how many of the batches are the user's, where more were made of them; those come first.
    """

    prepared: Prepared
    recipe: Recipe
    slim: ir.Model
    ledger: Ledger
    stand: Ints
    deadline: float | None
    masks: tuple[Bools | None, ...] = field(default=())
    facts: Facts | None = None
    alias: Mapping[str, str] = field(default_factory=dict)
    few: tuple[int, ...] | None = None
    steps: Steps = field(default_factory=Steps)
    real: int | None = None

    def walk(self, model: ir.Model, numbers: Sequence[int] | None = None) -> Walk:
        """All batches, or those of some numbers, at the entrance of a model."""
        prepared = self.prepared
        ports = between(prepared.model, model)  # key-value caches that are inputs may have lost heads
        makers = prepared.batches.feeds
        feeds = (fit(make(), ports) for k, make in enumerate(makers) if numbers is None or k in numbers)
        facts = self.facts if self.facts is not None and model is self.slim else prepared.survey.facts
        return Walk(model, facts, feeds, providers=self.recipe.providers)

    def own(self) -> Facts:
        """Shapes as the narrowed model has them now."""
        feed = fit(self.prepared.feed, between(self.prepared.model, self.slim))
        return observe(self.slim, feed, providers=self.recipe.providers)

    def here(self, name: str) -> str:
        """What a tensor of the dense model is called in the narrowed one."""
        return self.alias.get(name, name)

    def alike(self, name: str) -> bool:
        """Whether a tensor can be compared: of a model narrowed elsewhere nobody knows which channels are left."""
        known = self.facts.shapes.get(self.here(name)) if self.facts is not None else None
        return known is None or known == self.prepared.survey.facts.shapes.get(name)

    @property
    def given(self) -> int:
        """How many batches are the user's."""
        return len(self.prepared.batches) if self.real is None else self.real

    @property
    def held(self) -> list[int]:
        """Numbers of the batches that choose; the others are learnt from.  Empty where there is only one."""
        count = self.given
        return list(range(EVERY - 1, count, EVERY)) or list(range(count))[1:][-1:]

    @property
    def learnt(self) -> list[int]:
        """Numbers of the other batches."""
        if self.few is not None:
            return list(self.few)
        return sorted(set(range(len(self.prepared.batches))) - set(self.held))

    @property
    def each(self) -> int:
        """How many batches an epoch takes: as many as it would without those that were made."""
        return len(self.learnt) if self.few is not None else self.given - len(self.held)

    def left(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0)

    def goal(self, name: str, array: Array) -> Array:
        """A tensor of the dense network with the channels that the narrowed one has: kept, or averaged by a fold."""
        for mark in self.prepared.survey.marks.get(name, ()):
            if self.ledger.dead[mark.labels].any():
                array = narrowed(array, mark.axes[0], mark.labels, self.ledger.dead, self.stand)
                array = np.ascontiguousarray(array)
        return array

    def outputs(self) -> list[str]:
        """Outputs of floating point that both models have, but for inputs passed on."""
        facts = self.prepared.survey.facts
        mine = [v.name or "" for v in self.prepared.model.graph.outputs]
        theirs = {v.name for v in self.slim.graph.outputs}
        inputs = {v.name for v in self.slim.graph.inputs}
        return [n for n in mine if n in theirs and n not in inputs and facts.has_floats(n)]

    def write(self, arrays: Mapping[str, Array]) -> dict[str, ir.TensorProtocol]:
        """New numbers for weights of the narrowed model; returns the old ones, which stay in the file they lie in."""
        old = {}
        for name, array in arrays.items():
            value = self.slim.graph.initializers[name]
            assert value.const_value is not None
            old[name] = value.const_value
            assign(value, array)
        return old

    def take_back(self, old: Mapping[str, ir.TensorProtocol]) -> None:
        """Give weights of the narrowed model the numbers that `write` has returned."""
        for name, tensor in old.items():
            self.slim.graph.initializers[name].const_value = tensor

    def tidy(self) -> None:
        """Between two blocks of a large model."""
        if weight_files(self.prepared.model):
            give_back()

    def apart(self, numbers: Sequence[int]) -> float:
        """How far the outputs are from the dense network's on some batches, by divergence or squared error."""
        names = self.outputs()
        dense, slim = (self._passed(m, names, sorted(numbers)) for m in (self.prepared.model, self.slim))
        sums: dict[str, Sums] = {}
        for number, theirs, ours in zip(sorted(numbers), dense, slim, strict=True):
            wanted = {n: self.goal(n, a) for n, a in theirs.items()}
            sums = add_batch(sums, wanted, ours, mask=self.masks[number])
        found = [r.kl if r.kl is not None else r.nmse for r in finish(sums)]
        return float(np.mean([f for f in found if f is not None]))

    def _passed(self, model: ir.Model, names: Sequence[str], numbers: Sequence[int]) -> list[dict[str, Array]]:
        """Outputs of a model by batch, brought there piece by piece: never is all of it in the runtime."""
        nodes = list(model.graph)
        walk = self.walk(model, numbers)
        alive = lives(model, self.prepared.survey.facts, [1] * len(nodes))
        found: list[dict[str, Array]] = [{} for _ in numbers]
        for piece in chunks(model, trainable(model), alive):
            made = {v.name for node in nodes[piece.begin : piece.end] for v in node.outputs}
            for one, passed in zip(found, walk.advance(piece.end, [n for n in names if n in made]), strict=True):
                one.update(passed)
            self.tidy()
        return [{n: one[n] for n in names if n in one} for one in found]


def masks_of(prepared: Prepared) -> tuple[Bools | None, ...]:
    """Per batch, which positions (samples, tokens) are real; None where all are."""
    return tuple(padding_mask(feed) for feed in prepared.batches)


def logits(names: Iterable[str], first: Mapping[str, Array]) -> tuple[frozenset[str], frozenset[str]]:
    """Outputs whose rows are distributions, and those of them that hold probabilities."""
    rows = {n for n in names if looks_like_logits(n, first[n])}
    return frozenset(rows), frozenset(n for n in rows if probable(first[n]))
