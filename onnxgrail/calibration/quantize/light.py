"""Store weights of layers in 8 bits, some of them in 16, in a model that computes in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.quantize.choose import WORTH, Choice, choose
from onnxgrail.calibration.quantize.shifts import shifts_of
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.bits.folded import HALF, Weight, folded, lifted, weights_of
from onnxgrail.graph.bits.slots import LOOP
from onnxgrail.graph.flatten.branches import folded as nested


@dataclass(frozen=True, slots=True, eq=False)
class Light:
    """A float model, and the numbers by which rounded weights shift the outputs of its layers."""

    source: ir.Model
    shifts: Mapping[str, Floats]

    def stored(self, half: Collection[str] = (), among: Collection[str] | None = None) -> ir.Model:
        """Return the model with weights in 8 bits, some of them in half precision; see `folded`."""
        return folded(self.source, half, self.shifts, among)

    def with_bits(self, bits: Mapping[str, int]) -> ir.Model:
        """Return the model whose weights have as many bits as a choice says; others keep theirs."""
        half = {name for name, few in bits.items() if few == HALF}
        return self.stored(half, {name for name, few in bits.items() if few == HALF // 2} | half)

    def halves(self, loss: Callable[[ir.Model], float], target: float, worth: float = WORTH) -> Choice:
        """Return the weights that need half precision, see `choose`."""
        sizes = {weight.origin: weight.array.size for weight in weights_of(self.source)}
        return choose(sizes, lambda names: loss(self.stored(names)), target=target, worth=worth)


def storable(model: ir.Model) -> list[Weight]:
    """Return the weights of a model that can lose bits in this form; flattened branches become branches again."""
    return weights_of(_bare(model))


def inside(model: ir.Model) -> list[str]:
    """Return the names before narrowing of weights that only branches of If and loops read, or that loops carry."""
    read: dict[bool, set[str | None]] = {False: set(), True: set()}
    for node in model.graph:
        read[node.op_type == LOOP].update(value.name for value in node.inputs if value is not None)
    return [one.origin for one in storable(model) if one.name not in read[False] or one.name in read[True]]


def converted(model: ir.Model, bits: Mapping[str, int]) -> list[Weight]:
    """Return the weights that a runtime converts when it loads the model, given their bits by name."""
    return [weight for weight in storable(model) if bits.get(weight.origin) in weight.forms()]


def _bare(model: ir.Model) -> ir.Model:
    """Return a copy as it is written, with constants as initializers."""
    return lifted(nested(model))


def blank(model: ir.Model) -> Light:
    """Return what `light_of` does, without measured numbers, to learn the size of a file: biases may be added."""
    source = _bare(model)
    biased = [weight for weight in weights_of(source) if weight.layer() is not None]
    return Light(source, {weight.name: np.zeros(weight.outputs) for weight in biased})


def light_of(model: ir.Model, feeds: Sequence[Feed]) -> Light:
    """Measure by how much rounded weights shift the outputs of layers.

    Args:
        model: a float model; flattened branches become branches again.
        feeds: calibration data.
    """
    source = _bare(model)
    return Light(source, shifts_of(source, feeds))
