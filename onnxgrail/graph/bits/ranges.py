"""Change ranges of rounded activations and biases, as ONNX Runtime's tool for static quantization writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats
from onnxgrail.graph.attributes import maker_of, numbers_of
from onnxgrail.graph.bits.exempt import BACK, PASSED, THERE

BIAS = 2  # slot of a layer's bias
TOP = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """A range that can be narrowed.

    Attributes:
        tensor: name of the rounded float tensor.
        scales: names of the scales that hold the range: of the tensor, and of one that only its Relu or Clip reads.
        scale, zero: () the numbers.
        least: the share of it that has to be left, or 32 bits cannot hold the biases of layers that read it.
    """

    tensor: str
    scales: tuple[str, ...]
    scale: Array
    zero: Array
    least: float


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """A bias in 32 bits.

    Attributes:
        layer: reads it; scale: of the layer's input.
        codes: (channels,) the integers; step: (channels,) or () their scale.
    """

    layer: ir.Node
    scale: ir.Value
    codes: ir.Value
    step: ir.Value


def ranges_of(model: ir.Model) -> list[Range]:
    """Return the ranges of activations, without those of the model's outputs, and those shared with constants."""
    firm = set[ir.Value | None]()
    owners: dict[ir.Value, ir.Node] = {}
    for node in model.graph:
        if node.op_type == BACK and (node.outputs[0].is_graph_output() or _number(node.inputs[0]) is not None):
            firm.add(node.inputs[1])
        if node.op_type == THERE and node.inputs[1] is not None:
            owners.setdefault(node.inputs[1], node)
    groups: dict[ir.Value, list[ir.Value]] = {}
    for scale, node in owners.items():
        groups.setdefault(_final(scale, node, owners), []).append(scale)
    least: dict[ir.Value, float] = {}
    for bias in biases_of(model):
        largest = float(np.abs(numbers_of(bias.codes).astype(np.float64)).max(initial=0))
        least[bias.scale] = max(least.get(bias.scale, 0.0), largest / TOP)
    found = []
    for scale, scales in groups.items():
        tensor, step, zero = owners[scale].inputs[0], _number(scale), _number(owners[scale].inputs[2])
        if firm.isdisjoint(scales) and tensor is not None and step is not None and zero is not None:
            names = tuple(value.name or "" for value in scales)
            found.append(Range(tensor.name or "", names, step, zero, max(least.get(value, 0.0) for value in scales)))
    return found


def _final(scale: ir.Value, node: ir.Node, owners: Mapping[ir.Value, ir.Node]) -> ir.Value:
    """Return the scale of what a Relu or Clip makes of a rounded tensor, if only it reads that and the scales agree."""
    reader = _only_reader(_only_reader(node))
    there = _only_reader(reader) if reader is not None and reader.op_type in PASSED else None
    other = there.inputs[1] if there is not None and there.op_type == THERE else None
    if there is None or other is None or owners.get(other) is not there or _number(other) != _number(scale):
        return scale
    return _final(other, there, owners)


def _only_reader(node: ir.Node | None) -> ir.Node | None:
    uses = list(node.outputs[0].uses()) if node is not None else []
    return uses[0].node if len(uses) == 1 else None


def narrow(model: ir.Model, shares: Mapping[str, float]) -> None:
    """Narrow ranges in place, both sides by the same share; biases, whose steps depend on them, keep their numbers.

    Args:
        model: the rounded model.
        shares: what is left of a range, by the name of the scale.
    """
    for bias in biases_of(model):
        share = shares.get(bias.scale.name or "", 1.0)
        if share < 1:
            _put(bias.codes, numbers_of(bias.codes) / share)
            _put(bias.step, numbers_of(bias.step) * share)
    for name, share in shares.items():
        value = model.graph.initializers[name]
        _put(value, numbers_of(value) * share)


def shift(model: ir.Model, shifts: Mapping[str, Floats]) -> None:
    """Add numbers to biases in place, as far as 32 bits hold the sums.

    Args:
        model: the rounded model.
        shifts: (channels,) by the name of the layer.
    """
    for bias in biases_of(model):
        codes, more = numbers_of(bias.codes), shifts.get(bias.layer.name or "")
        if more is not None and more.shape == codes.shape:
            _put(bias.codes, np.clip(codes + more / numbers_of(bias.step), -TOP, TOP))


def biases_of(model: ir.Model) -> Iterator[Bias]:
    """Return the biases in 32 bits of layers that read rounded activations."""
    for node in model.graph:
        back, bias = _back(node, 0), _back(node, BIAS)
        if back is None or bias is None or back.inputs[1] is None or back.inputs[1].const_value is None:
            continue
        codes, step = bias.inputs[:2]
        if codes is not None and step is not None and codes.const_value is not None:
            yield from [Bias(node, back.inputs[1], codes, step)] if codes.const_value.dtype == ir.DataType.INT32 else []


def _back(node: ir.Node, slot: int) -> ir.Node | None:
    """Return the node that converts an input back to float; None for inputs in float."""
    maker = maker_of(node, slot)
    return maker if maker is not None and maker.op_type == BACK else None


def _number(value: ir.Value | None) -> Array | None:
    """Return the numbers of a constant; None for other values."""
    return value.const_value.numpy() if value is not None and value.const_value is not None else None


def _put(value: ir.Value, array: Array) -> None:
    """Replace the numbers of a constant; they are rounded if its type is."""
    kind = numbers_of(value).dtype
    value.const_value = ir.tensor((np.rint(array) if kind.kind == "i" else array).astype(kind), name=value.name)
