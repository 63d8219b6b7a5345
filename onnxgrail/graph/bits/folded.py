"""Store float weights in 8 or 16 bits that a runtime converts once, when it loads the model.

ONNX Runtime computes the `DequantizeLinear` of a constant weight again in each run.  It folds `Cast` and `Mul` of
constants, so the layers that read them compute in float32, as fast as before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from onnxgrail.core import Array
from onnxgrail.graph.attributes import BIAS, BIASED, input_of, integer, numbers_of
from onnxgrail.graph.bits.slots import axes_of, only_layers, slots_of
from onnxgrail.graph.rewrite.unique import origin
from onnxgrail.graph.stored.find import CODES

FIXED = {**dict.fromkeys(BIASED, (BIAS,)), "BatchNormalization": (1, 2, 3, 4)}
NONE: Mapping[str, Array] = {}
TOP = 127
HALF = 16  # bits of half precision
NODES, NAMES = 120, 9  # bytes of the nodes and tensors that replace a weight, and how often they repeat its name
LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class Codes:
    """The form of a weight in 8 or 16 bits.

    Attributes:
        bits: 8 for integers with scales, 16 for half precision.
        axes: the axes along which numbers share a scale.
        name: of the weight.
        half: its layers compute in half precision.
    """

    bits: int
    axes: tuple[int, ...]
    name: str
    half: bool = False

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape, with the nodes that convert it."""
        size, more = int(np.prod(shape)), NODES + NAMES * len(self.name)
        if self.bits == HALF:
            return 2 * size + more // 2  # one node of two, and no scales
        more += more // 2 if self.half else 0
        return size + 4 * (size // max(1, int(np.prod([shape[axis] for axis in self.axes])))) + more

    def numbers(self, array: Array) -> Array:
        """Return the numbers that the file will hold."""
        if self.bits == HALF:
            return array.astype(np.float16).astype(array.dtype)
        codes, scale = rounded(array, self.axes)
        return (codes * scale).astype(array.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A float weight, of 16 or 32 bits, that can be stored in 8 bits.

    Attributes:
        value: the initializer.
        axes: the axes along which numbers share a scale.
    """

    value: ir.Value
    axes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the initializer."""
        return self.value.name or ""

    @property
    def origin(self) -> str:
        """The name before narrowing."""
        return origin(self.name)

    @property
    def array(self) -> Array:
        """The numbers."""
        return numbers_of(self.value)

    @property
    def outputs(self) -> int:
        """The number of output channels of its layer."""
        node = self.layer()
        groups = integer(node, "group", 1) if node is not None and node.op_type == "ConvTranspose" else 1
        return groups * math.prod(int(n) for axis, n in enumerate(self.array.shape) if axis not in self.axes)

    def forms(self) -> dict[int, Codes]:
        """Return the form by the number of bits, the most bits first; half precision if it can hold the numbers."""
        if self.half:
            return {HALF // 2: Codes(HALF // 2, self.axes, self.name, half=True)}
        found = {bits: Codes(bits, self.axes, self.name) for bits in (HALF, HALF // 2)}
        return {bits: form for bits, form in found.items() if bits < HALF or np.abs(self.array).max() <= LARGEST}

    @property
    def half(self) -> bool:
        """True if it is stored in half precision."""
        return self.value.dtype == ir.DataType.FLOAT16

    def layer(self) -> ir.Node | None:
        """Return the only layer that reads it, if that can have a bias in float32."""
        ((node, slot), *others) = self.value.uses()
        biased = node.op_type in BIASED and not node.domain and not self.half
        return node if biased and slot == 1 and not others and node.graph is self.value.graph else None


def lifted(model: ir.Model) -> ir.Model:
    """Return a copy whose constants are initializers instead of nodes, and whose layers read no inputs as constants.

    A runtime folds a normalization into a layer only if the weights of both are no inputs.
    """
    made = model.clone()
    LiftConstantsToInitializersPass()(made)
    weights = {
        value
        for node in ir.traversal.RecursiveGraphIterator(made.graph)
        for slot in (*slots_of(node), *FIXED.get(node.op_type, ()))
        for value in node.inputs[slot : slot + 1]
    }
    for value in [value for value in made.graph.inputs if value in weights and value.is_initializer()]:
        made.graph.inputs.remove(value)
    return made


def weights_of(model: ir.Model) -> list[Weight]:
    """Return the float weights of layers that take fewer bytes in 8 bits, in the order of the model, with branches."""
    found: dict[ir.Value, Weight] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for slot, value in enumerate(node.inputs):
            if value is None or value in found or not _plain(value):
                continue
            axes = axes_of(node, slot, value)
            if axes and _smaller(value, axes) and only_layers(value):
                found[value] = Weight(value, axes)
    return [weight for weight in found.values() if np.isfinite(weight.array).all()]


def folded(
    model: ir.Model,
    half: Collection[str] = (),
    shifts: Mapping[str, Array] = NONE,
    among: Collection[str] | None = None,
) -> ir.Model:
    """Return a copy whose float weights are stored as int8 with a scale per channel, or in half precision.

    Args:
        model: the graph; not changed.
        half: names before narrowing of weights that get half precision; those that would overflow stay in float32.
        shifts: numbers by weight that are added to the bias of its layer if it gets 8 bits.
        among: names before narrowing of the weights that lose bits; None for all.
    """
    made = model.clone()
    taken = _names(made)
    for weight in weights_of(made):
        if among is not None and weight.origin not in among:
            continue
        array, graph = weight.array, weight.value.graph
        assert graph is not None
        place = _Place(graph, graph[0], weight.name, taken)
        if weight.origin not in half:
            integers, scale = rounded(array, weight.axes)
            number = place.node("Cast", [place.constant(integers, "8")], ir.AttrInt64("to", int(ir.DataType.FLOAT)))
            number = place.node("Mul", [number, place.constant(scale, "s")])
            if weight.half:  # scales may be too small for half precision
                number = place.node("Cast", [number], ir.AttrInt64("to", int(ir.DataType.FLOAT16)))
                number.type = ir.TensorType(ir.DataType.FLOAT16)
            else:
                _shift(place, weight, shifts.get(weight.name))
        elif np.abs(array).max() <= LARGEST and not weight.half:
            halves = place.constant(array.astype(np.float16), "16")
            number = place.node("Cast", [halves], ir.AttrInt64("to", int(ir.DataType.FLOAT)))
        else:
            continue
        weight.value.replace_all_uses_with(number)
        del graph.initializers[place.name]
        number.name, number.shape = place.name, weight.value.shape
    return made


def _shift(place: _Place, weight: Weight, shift: Array | None) -> None:
    """Add numbers per channel to the bias of a layer, which gets one if it has none."""
    node = weight.layer()
    if shift is None or node is None:
        return
    bias = input_of(node, BIAS)
    if bias is None:
        node.resize_inputs(BIAS + 1)
        node.replace_input_with(BIAS, place.constant(shift.astype(np.float32), "b"))
        return
    if not _plain(bias) or bias.dtype != ir.DataType.FLOAT or (node.op_type == "Gemm" and "beta" in node.attributes):
        return
    numbers = (numbers_of(bias) + shift).astype(np.float32)
    node.replace_input_with(BIAS, place.constant(numbers, "b"))
    if not bias.uses() and bias.graph is not None:
        del bias.graph.initializers[bias.name or ""]


def rounded(array: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the codes of an array as int8, and the scales; their product is nearest to the array."""
    scale = np.abs(array).max(axis=axes, keepdims=True).astype(np.float32) / np.float32(TOP)
    scale[scale == 0] = 1
    return np.clip(np.rint(array / scale), -TOP, TOP).astype(np.int8), scale


def added(graph: ir.Graph, array: Array, name: str) -> ir.Value:
    """Add an initializer of a name that is not taken; return it."""
    kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=kind, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def appended(
    graph: ir.Graph, op: str, inputs: Iterable[ir.Value | None], name: str, attributes: Iterable[ir.Attr] = ()
) -> ir.Value:
    """Add a node at the end of a graph; return its output, which gets this name."""
    node = ir.Node("", op, list(inputs), list(attributes))
    node.outputs[0].name = name
    graph.append(node)
    return node.outputs[0]


def is_folded(model: ir.Model) -> bool:
    """Return True if a weight is a constant that a `Cast`, or a lookup, turns into floats and a `Mul` scales."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        codes = node.inputs[0] if node.op_type == "Cast" else None
        if codes is not None and codes.dtype in CODES and codes.is_initializer() and not codes.is_graph_input():
            readers = [use.node for use in node.outputs[0].uses()]
            readers += [use.node for one in readers if one.op_type == "Gather" for use in one.outputs[0].uses()]
            scaled = [reader for reader in readers if reader.op_type == "Mul"]
            if any(v is not None and v.is_initializer() for one in scaled for v in one.inputs):
                return True
    return False


def _plain(value: ir.Value) -> bool:
    """Return True for a constant that is neither computed nor an input or output of the model."""
    if value.const_value is None or value.producer() is not None or value.graph is None:
        return False
    return value.is_initializer() and not value.is_graph_input() and not value.is_graph_output()


def _smaller(value: ir.Value, axes: tuple[int, ...]) -> bool:
    """Return True if a constant takes fewer bytes in 8 bits."""
    assert value.const_value is not None
    few = Codes(HALF // 2, axes, value.name or "", half=value.dtype == ir.DataType.FLOAT16)
    return few.bytes(tuple(value.const_value.shape.numpy())) < value.const_value.nbytes


def _names(model: ir.Model) -> set[str]:
    """Return the names of all values, in branches, too."""
    graphs = [model.graph, *{n.graph for n in ir.traversal.RecursiveGraphIterator(model.graph) if n.graph is not None}]
    names = {name for graph in graphs for name in graph.initializers} | {v.name or "" for v in model.graph.inputs}
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    return names | {value.name or "" for node in nodes for value in node.outputs}


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A graph that gets nodes and constants for a weight of this name, before a node; and all names that are taken."""

    graph: ir.Graph | ir.Function
    before: ir.Node
    name: str
    taken: set[str]

    def constant(self, array: Array, end: str) -> ir.Value:
        """Add an initializer; return it."""
        assert isinstance(self.graph, ir.Graph)
        return added(self.graph, array, self._free(end))

    def node(self, op: str, inputs: list[ir.Value], *attributes: ir.Attr) -> ir.Value:
        """Add a node that computes float32; return its output."""
        node = ir.Node("", op, inputs, attributes)
        value = node.outputs[0]
        value.name, value.type, value.shape = self._free("f"), ir.TensorType(ir.DataType.FLOAT), inputs[0].shape
        self.graph.insert_before(self.before, node)
        return value

    def _free(self, end: str) -> str:
        """Return a name that is not taken."""
        name = f"{self.name}/{end}"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name
