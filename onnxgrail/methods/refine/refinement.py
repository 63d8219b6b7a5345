"""The state that refinements share: the two models, held-out batches, and the error of the outputs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.fit.channelwise import narrowed
from onnxgrail.calibration.feeds.judging import gate
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Array, Bools, Ints, Outcome, Recipe
from onnxgrail.fidelity import Sums, add_batch, finish, looks_like_logits, probable
from onnxgrail.fidelity.lists import lists_of
from onnxgrail.graph.cuts.chunks import chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.io.mapped import weight_files
from onnxgrail.graph.rewrite.assign import assign
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.memory import give_back
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.machine.steps.steps import Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Refined:
    """The report entry of one fit.

    Attributes:
        block: the part of the network; kind: of refinement.
        before, after: error on held-out batches: squared, as a share of the dense energy; if `block` is the model and
            an output holds logits, the divergence in nats, to which distillation adds that share.
        epochs, seconds: epochs and seconds of the fit.
        added: new parts of the model: `ic` gives form, place, rank, params and macs (per sample).
        outcome: `plain` if the weights stay because nothing better was found, `skipped` if nothing was tried.
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
    """The dense model as prepared, and the narrowed model, whose initializers are overwritten.

    Attributes:
        ledger: all decisions; stand: the unit that represents each unit.
        deadline: time to stop, on the clock of `time.perf_counter`; None for no limit.
        masks: per batch, the mask of real positions.
        facts: of the narrowed model, if another tool narrowed it.
        alias: names of the dense model's tensors in such a narrowed model.
        steps: cache of fits.
        real: number of given batches, if more were made; the given ones come first.
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
    steps: Steps = field(default_factory=Steps)
    real: int | None = None

    def walk(self, model: ir.Model, numbers: Sequence[int] | None = None) -> Walk:
        """Return a walk of all batches, or those with the given numbers, at the beginning of a model."""
        makers = self.prepared.fed(model).feeds
        feeds = (make() for k, make in enumerate(makers) if numbers is None or k in numbers)
        facts = self.facts if self.facts is not None and model is self.slim else self.prepared.survey.facts
        return Walk(model, facts, feeds, providers=self.recipe.providers)

    def own(self) -> Facts:
        """Return the present shapes of the narrowed model."""
        return observe(self.slim, self.prepared.fed_small(self.slim), providers=self.recipe.providers)

    def here(self, name: str) -> str:
        """Return the name of a dense tensor in the narrowed model."""
        return self.alias.get(name, name)

    def alike(self, name: str) -> bool:
        """Return True if the tensor can be compared.

        Models narrowed by other tools don't say which channels they kept.
        """
        known = self.facts.shapes.get(self.here(name)) if self.facts is not None else None
        return known is None or known == self.prepared.survey.facts.shapes.get(name)

    @property
    def given(self) -> int:
        """Return the number of given batches."""
        return len(self.prepared.batches) if self.real is None else self.real

    @property
    def held(self) -> list[int]:
        """Return the numbers of the held-out batches, which choose the weights. Empty if there is only one batch."""
        return gate(self.given)

    @property
    def learnt(self) -> list[int]:
        """Return the numbers of the batches to learn from."""
        return sorted(set(range(len(self.prepared.batches))) - set(self.held))

    @property
    def each(self) -> int:
        """Return the number of batches per epoch; new batches don't change it."""
        return self.given - len(self.held)

    def left(self) -> float | None:
        """Return the seconds until the deadline."""
        return None if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0)

    def goal(self, name: str, array: Array) -> Array:
        """Return a dense tensor narrowed to the kept channels; channels joined by a fold are averaged.

        Outputs whose channels are in a basis of their own in the narrowed model alone are brought into it.
        """
        if name not in self.prepared.survey.marks:
            return fit({name: array}, between(self.prepared.model, self.slim))[name]
        for mark in self.prepared.survey.marks.get(name, ()):
            if self.ledger.dead[mark.labels].any():
                array = narrowed(array, mark.axes[0], mark.labels, self.ledger.dead, self.stand)
                array = np.ascontiguousarray(array)
        return array

    def outputs(self) -> list[str]:
        """Return the names of floating-point outputs that both models have, without inputs passed through."""
        facts = self.prepared.survey.facts
        mine = [v.name or "" for v in self.prepared.model.graph.outputs]
        theirs = {v.name for v in self.slim.graph.outputs}
        inputs = {v.name for v in self.slim.graph.inputs}
        return [n for n in mine if n in theirs and n not in inputs and facts.has_floats(n)]

    def write(self, arrays: Mapping[str, Array]) -> dict[str, ir.TensorProtocol]:
        """Write new weights into the narrowed model; return the old ones, which stay in their file."""
        old = {}
        for name, array in arrays.items():
            value = self.slim.graph.initializers[name]
            assert value.const_value is not None
            old[name] = value.const_value
            assign(value, array)
        return old

    def take_back(self, old: Mapping[str, ir.TensorProtocol]) -> None:
        """Restore the weights that `write` returned."""
        for name, tensor in old.items():
            self.slim.graph.initializers[name].const_value = tensor

    def tidy(self) -> None:
        """Release memory between two blocks of a large model."""
        if weight_files(self.prepared.model):
            give_back()

    def apart(self, numbers: Sequence[int]) -> float:
        """Compute the mean error of the outputs on the given batches, by divergence or squared error."""
        names = self.outputs()
        dense, slim = (self._passed(m, names, sorted(numbers)) for m in (self.prepared.model, self.slim))
        sums: dict[str, Sums] = {}
        lists = lists_of(self.prepared.model.graph.outputs)
        for number, theirs, ours in zip(sorted(numbers), dense, slim, strict=True):
            wanted, got = lists.leveled({}, {n: self.goal(n, a) for n, a in theirs.items()}, ours)
            sums = add_batch(sums, wanted, got, mask=self.masks[number])
        found = [r.kl if r.kl is not None else r.nmse for r in finish(sums)]
        return float(np.mean([f for f in found if f is not None]))

    def _passed(self, model: ir.Model, names: Sequence[str], numbers: Sequence[int]) -> list[dict[str, Array]]:
        """Return the outputs of a model per batch, computed piece by piece to limit memory."""
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


def logits(names: Iterable[str], first: Mapping[str, Array]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the outputs whose rows are distributions, and those of them that hold probabilities."""
    rows = {n for n in names if looks_like_logits(n, first[n])}
    return frozenset(rows), frozenset(n for n in rows if probable(first[n]))


Fit = tuple[Refined, Mapping[str, Array]]
"""The report entry of a fit, and the new weights."""


def _encode(fit: Fit) -> Record:
    entry, arrays = fit
    return Record(arrays=arrays, notes={"entry": dataclasses.asdict(entry)})


def _decode(record: Record) -> Fit:
    fields = record.notes["entry"]
    return Refined(**{**fields, "outcome": Outcome(**fields["outcome"])}), record.arrays


FIT: Codec[Fit] = Codec(_encode, _decode)
