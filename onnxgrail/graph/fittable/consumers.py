"""Matrices and convolutions whose weights can be fitted, with their inputs, outputs and residual sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Ints
from onnxgrail.graph.attributes import given, input_of, integers, name_of, number, text
from onnxgrail.graph.rewrite.holdings import is_compact
from onnxgrail.graph.rewrite.weights import loading
from onnxgrail.graph.rotate.marked import is_cached
from onnxgrail.graph.stored.find import is_wide
from onnxgrail.graph.trace.facts import Facts, captures, constant_of, key
from onnxgrail.graph.trace.survey import Operand, Survey

Room = Literal["bias", "shared", "joint", "slot", "none"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """The window of a convolution, per spatial axis; pads are (begin, end), None if they follow from the input's size.

    Such pads (`auto_pad`) are shared equally between the sides; `first` is True if an odd one goes to the beginning.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...] | None
    first: bool = False

    @property
    def reach(self) -> tuple[int, ...]:
        """Return the number of input positions that one output position spans, per axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def sides(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the pads (begin, end) of every axis.

        Args:
            sizes: spatial sizes of the input.
        """
        if self.pads is not None:
            return list(self.pads)
        found = []
        for size, stride, reach in zip(sizes, self.strides, self.reach, strict=True):
            total = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
            less, more = total // 2, total - total // 2
            found.append((more, less) if self.first else (less, more))
        return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Consumer:
    """A node that multiplies channels by a weight of its own.

    Attributes:
        node: key of the node; position: of the node in the graph.
        param: working array of the weight; value: name of the weight; units: as in `Operand`.
        inward, outward: input and output axis of the weight; window: of a convolution, None for a matrix.
        source: the activation it reads; axis: its channel axis.
        output: the activation it computes; made: the channel axis of the output.
        bias: the bias added inside the node or to its output, (o,), zeros if there is none; inner: it is added inside.
        plain: the output is the product plus an inner bias, and is not rounded to half precision.
        room: `bias` if there is a bias of its own, `shared` if other nodes read that bias, too, so that a change needs
            a copy, `joint` if it loses the same positions for all of them, so that it stays one, `slot` if the node can
            take one, `none` if a new node would be needed.
        total: the sum of the output (with bias) and a residual, '' if there is none; residual: the other summand.
    """

    node: str
    position: int
    param: str
    value: str
    units: Mapping[int, Ints]
    inward: int
    outward: int
    window: Window | None
    source: str
    axis: int
    output: str
    made: int
    bias: Array
    inner: bool
    plain: bool
    room: Room
    total: str
    residual: str

    @property
    def has_bias(self) -> bool:
        """Return True if it has a bias whose numbers can change."""
        return self.room in ("bias", "shared", "joint")


BIASED = ("Conv", "Gemm")  # layers that can have a bias as their third input


def consumers(model: ir.Model, survey: Survey) -> tuple[Consumer, ...]:
    """Return every matrix and plain convolution with a constant weight, in node order.

    Weights with several readers are left out, since no single output determines them, weights that the file stores
    with fewer numbers than they have, and layers whose inner bias is not known: it would be fitted a second time.
    """
    readers: dict[str, int] = {}
    compact = survey.compact()
    for claim in survey.operands.values():
        readers[claim.param] = readers.get(claim.param, 0) + 1
    found = []
    for position, node in enumerate(model.graph):
        operand = None if is_cached(node) else survey.operands.get((key(node), 1))
        axes = _axes(node, survey.facts) if operand is not None else None
        single = operand is not None and readers[operand.param] == 1 and operand.param not in compact
        if operand is not None and axes is not None and single:
            layer = _consumer(node, position, operand, axes, survey.facts)
            if layer is not None and layer.room == "shared" and _joint(node, survey, readers):
                layer = replace(layer, room="joint")
            found += [] if layer is None else [layer]
    return tuple(found)


def _joint(node: ir.Node, survey: Survey, readers: Mapping[str, int]) -> bool:
    """Return True if others read the bias of a layer as it is narrowed for this layer."""
    place = 5 if node.op_type == "MatMulNBits" else 2
    at = key(node), place
    if len(node.inputs) <= place:
        (use,) = node.outputs[0].uses()
        at = key(use.node), 1 - use.idx
    operand = survey.operands.get(at)
    return operand is not None and readers[operand.param] > 1


def unmarked(model: ir.Model, survey: Survey) -> dict[tuple[str, int], Operand]:
    """Return weights of matrices and convolutions that lose no position, as operands, so that they can be fitted.

    Only weights without other readers and with all numbers in the file: others would make the file larger.
    """
    found = {}
    for node in model.graph:
        place = key(node), 1
        if place in survey.operands or is_cached(node) or _axes(node, survey.facts) is None:
            continue
        weight, name = node.inputs[1], name_of(node, 1)
        if weight is None or name in survey.facts.stored or not _sole(weight, survey.facts):
            continue
        if is_compact(weight, survey.facts):
            continue
        if weight.const_value is not None or name in survey.facts.values:
            found[place] = Operand(param=name, value=name, units={})
    return found


def downstream(model: ir.Model, names: Iterable[str]) -> set[str]:
    """Return these tensors and every tensor that depends on them."""
    found = set(names)
    for node in model.graph:
        read = {v.name for v in node.inputs if v is not None} | captures(node)
        if read & found:
            found |= {v.name for v in node.outputs if v.name}
    return found


def _sole(value: ir.Value, facts: Facts) -> bool:
    """Return True if a constant and everything it is computed from have one reader."""
    if value.name not in facts.constants or len(value.uses()) != 1 or value.is_graph_output() or value.is_graph_input():
        return False
    node = value.producer()
    return node is None or all(v is None or _sole(v, facts) for v in node.inputs)


def _axes(node: ir.Node, facts: Facts) -> tuple[int, int] | None:
    """Return the input and output axis of a node's weight; None if its output is not a plain sum of products."""
    known = all(v is None or v.name in facts.shapes for v in (*node.inputs, *node.outputs))
    packed = node.op_type == "MatMulNBits" and name_of(node, 1) in facts.stored
    if not known or (node.domain and not packed):
        return None
    shapes = [facts.shapes[v.name or ""] for v in node.inputs[:2] if v is not None]
    ranks = [len(shape) for shape in shapes]
    if any(0 in shape for shape in shapes[1:]):  # an empty sum or an empty output
        return None
    if packed or node.op_type == "MatMul":
        return ((1, 0) if packed else (0, 1)) if ranks[0] and ranks[1] == 2 else None
    if node.op_type == "Gemm":
        plain = all(number(node, n, d) == d for n, d in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)))
        return ((1, 0) if number(node, "transB", 0) else (0, 1)) if plain else None
    return (1, 0) if node.op_type == "Conv" and number(node, "group", 1) == 1 else None


def _consumer(node: ir.Node, position: int, operand: Operand, axes: tuple[int, int], facts: Facts) -> Consumer | None:
    source, output = given(node, 0), node.outputs[0]
    conv, packed = node.op_type == "Conv", node.op_type == "MatMulNBits"
    rank, place = len(facts.shapes[output.name or ""]), 5 if packed else 2
    width = facts.shapes[operand.value][axes[1]]
    within = input_of(node, place)
    bias = _constant(within, facts, width, spread=True)
    if within is not None and bias is None:
        return None
    last, added = (output, None) if len(node.inputs) > place else biased(output, facts, width, conv=conv)
    total, residual = _added(last, facts)
    return Consumer(
        node=key(node),
        position=position,
        param=operand.param,
        value=operand.value,
        units=operand.units,
        inward=axes[0],
        outward=axes[1],
        window=_window(node, facts.shapes[operand.value]) if conv else None,
        source=source.name or "",
        axis=1 if conv else len(facts.shapes[source.name or ""]) - 1,
        output=output.name or "",
        made=1 if conv else rank - 1,
        bias=next((b for b in (bias, added if total else None) if b is not None), np.zeros(width)),
        inner=bias is not None,
        plain=facts.dtypes[output.name or ""].itemsize > 2 and not packed,
        room=_room(node, within if within is not None else None if added is None else _beside(output), facts),
        total=total,
        residual=residual,
    )


def _room(node: ir.Node, bias: ir.Value | None, facts: Facts) -> Room:
    """Return the place of new numbers of a layer's bias, see `Consumer`."""
    if bias is None:
        return "slot" if node.op_type in BIASED else "none"
    if bias.name in facts.stored and not is_wide(bias):
        return "none"
    return "bias" if _alone(bias) else "shared"


def _alone(value: ir.Value) -> bool:
    """Return True if a constant and everything it is computed from have one reader."""
    node = value.producer()
    parts = () if node is None else node.inputs
    return len(value.uses()) == 1 and not value.is_graph_output() and all(v is None or _alone(v) for v in parts)


def _window(node: ir.Node, shape: tuple[int, ...]) -> Window:
    kernel = shape[2:]
    ones = (1,) * len(kernel)
    strides, dilations = (integers(node, name, ones) for name in ("strides", "dilations"))
    auto = text(node, "auto_pad")
    pads = integers(node, "pads", (0,) * (2 * len(kernel))) if auto in ("", "NOTSET") else (0,) * (2 * len(kernel))
    sides = tuple((pads[a], pads[a + len(kernel)]) for a in range(len(kernel)))
    same, first = auto.startswith("SAME"), auto == "SAME_LOWER"
    return Window(kernel=kernel, strides=strides, dilations=dilations, pads=None if same else sides, first=first)


def _constant(value: ir.Value | None, facts: Facts, width: int, *, spread: bool = False) -> Array | None:
    """Return a constant with one number per output channel; None for others. `spread` repeats a single number."""
    if value is None or value.name not in facts.constants:
        return None
    array = _numbers(value, facts)
    if spread and array is not None and array.size == 1:
        array = np.broadcast_to(array.ravel(), width)
    return np.asarray(array, dtype=np.float64).ravel() if array is not None and array.size == width else None


def _numbers(value: ir.Value, facts: Facts) -> Array | None:
    """Return the numbers of a constant, decoded if it is quantized; None if they are not known."""
    name, node = value.name or "", value.producer()
    stored = facts.stored.get(name)
    if stored is None or node is None or node.graph is None:
        return constant_of(value, name, facts)
    held = node.graph.initializers if isinstance(node.graph, ir.Graph) else {}
    return stored.decode(loading(held, facts))


def biased(output: ir.Value, facts: Facts, width: int, *, conv: bool) -> tuple[ir.Value, Array | None]:
    """Follow the output through the Add of a constant bias, if that is the only reader; return the bias too."""
    readers = list(output.uses())
    if conv or len(readers) != 1 or output.is_graph_output() or readers[0].node.op_type != "Add":
        return output, None
    bias = _constant(_beside(output), facts, width)
    return (output, None) if bias is None else (readers[0].node.outputs[0], bias)


def _beside(output: ir.Value) -> ir.Value | None:
    """Return the other summand of the Add that reads an output."""
    (use,) = output.uses()
    return use.node.inputs[1 - use.idx]


def _added(output: ir.Value, facts: Facts) -> tuple[str, str]:
    """Return the sum with a residual of the same shape, and the residual; ('', '') if the output has other readers."""
    readers = list(output.uses())
    if len(readers) != 1 or output.is_graph_output() or readers[0].node.op_type != "Add":
        return "", ""
    name = name_of(readers[0].node, 1 - readers[0].idx)
    total = readers[0].node.outputs[0].name or ""
    same = facts.shapes.get(name) == facts.shapes.get(total) == facts.shapes.get(output.name or "")
    return (total, name) if same and name not in facts.constants else ("", "")
