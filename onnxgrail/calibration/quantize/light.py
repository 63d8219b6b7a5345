"""Store weights of layers in 8 bits, some of them in 16, in a model that computes in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.quantize.choose import WORTH, Choice, choose
from onnxgrail.calibration.quantize.shifts import shifts_of
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.bits.folded import HALF, Weight, folded, lifted, weights_of
from onnxgrail.graph.bits.slots import LOOP
from onnxgrail.graph.flatten.branches import folded as nested
from onnxgrail.graph.io.model_file import weight_bytes

LITTLE = 0.01  # share of the bytes of a model's weights that may be added for half precision of the smallest


@dataclass(frozen=True, slots=True, eq=False)
class Light:
    """A float model, and the numbers by which rounded weights shift the outputs of its layers."""

    source: ir.Model
    shifts: Mapping[str, Floats]

    @property
    def small(self) -> list[str]:
        """Return the weights that get 16 bits where all others get 8, see `smallest`."""
        return smallest(weights_of(self.source), weight_bytes(self.source))

    def stored(self, half: Collection[str] = (), among: Collection[str] | None = None) -> ir.Model:
        """Return the model with weights in 8 bits, some of them in half precision; see `folded`.

        Args:
            half: weights in half precision; if all weights change, the smallest have it, too.
            among: the weights that change; None for all.
        """
        half = {*half, *self.small} if among is None else half
        return folded(self.source, half, self.shifts, among)

    def with_bits(self, bits: Mapping[str, int]) -> ir.Model:
        """Return the model whose weights have as many bits as a choice says; others keep theirs."""
        half = {name for name, few in bits.items() if few == HALF}
        return self.stored(half, {name for name, few in bits.items() if few == HALF // 2} | half)

    def halves(
        self, loss: Callable[[ir.Model], float], target: float, worth: float = WORTH, begun: Collection[str] = ()
    ) -> Choice:
        """Return the weights that need half precision beside the smallest, `begun` and others; see `choose`."""
        known = {*begun, *self.small}
        sizes = {weight.origin: weight.array.size for weight in weights_of(self.source) if weight.origin not in known}
        found = choose(sizes, lambda names: loss(self.stored({*begun, *names})), target=target, worth=worth)
        return replace(found, layers=(*begun, *found.layers))


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


def smallest(coded: Sequence[Weight], total: int) -> list[str]:
    """Return the weights, by their names before narrowing, that get 16 bits because the second byte adds little.

    Small layers can need it most: the last one of a denoiser takes the difference of large numbers.

    Args:
        coded: weights that would get 8 bits.
        total: bytes of all weights, of `coded` as they are in float.
    """
    sizes = {one.origin: one.array.size for one in coded if HALF in one.forms()}
    room = LITTLE * (total - sum(one.array.nbytes - one.array.size for one in coded))
    names = sorted(sizes, key=lambda name: sizes[name])
    return [name for name, taken in zip(names, accumulate(sizes[n] for n in names), strict=True) if taken <= room]


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
