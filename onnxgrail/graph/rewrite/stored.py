"""Cut quantized weights: they stay quantized, under the same nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats
from onnxgrail.errors import RewriteError
from onnxgrail.graph.attributes import given, input_of, maker_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import Place, own_node, set_operands
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.stored.find import is_dequantised, parts_of
from onnxgrail.graph.stored.integers import Load, Stored, safe
from onnxgrail.graph.stored.looked_up import CODES, SCALE, TARGET
from onnxgrail.graph.trace.facts import constant_of
from onnxgrail.graph.trace.survey import Ledger, Operand, Survey

User = tuple[ir.Node, int, Operand]
Growth = dict[ir.Value, Floats]  # a dequantized weight -> growth factor of its scales
WEIGHT, BIAS = 1, 2  # operands of Conv, Gemm and their like


def cut_stored(
    graph: ir.Graph, stored: Stored, users: Sequence[User], survey: Survey, ledger: Ledger, captured: Collection[str]
) -> tuple[set[ir.Value], Growth]:
    """Narrow the parts of a quantized weight for the operands of one working array.

    Args:
        graph: changed in place.
        stored: the weight.
        users: the operands.
        survey: the trace of the original model.
        ledger: the decisions.
        captured: names that bodies of nodes read.

    Returns:
        Values that the operands no longer read, and the growth of the scales.

    Raises:
        RewriteError: a part has no value.
    """
    operand = users[0][2]
    keep = {axis: ~ledger.dead[units] for axis, units in operand.units.items() if ledger.dead[units].any()}
    values = ledger.arrays.get(operand.param)
    holders = _holders(graph, stored, [(node, position) for node, position, _ in users])
    load = _load(next(iter(holders)), survey)
    parts = stored.cut(load, keep, values)
    growth: Growth = {}
    if stored.held:
        before = (parts if values is None else stored.cut(load, keep, None))[SCALE].astype(np.float64)
        factor = np.where(before == 0, 1.0, parts[SCALE].astype(np.float64) / safe(before))
        shape = [int(keep[a].sum()) if a in keep else size for a, size in enumerate(stored.shape)]
        for value in holders.values():
            if value.shape is not None:
                value.shape = ir.Shape(shape)
            if (factor > 1).any():
                growth[value] = factor
    return _set(graph, list(holders), parts, captured), growth


def follow(
    graph: ir.Graph, nodes: Sequence[ir.Node], growth: Growth, survey: Survey, captured: Collection[str]
) -> set[ir.Value]:
    """Re-encode int32 biases of weights whose scales grew.

    Fused kernels add a bias's integers to sums of integer products, so its scale must stay the product of the input's
    and the weight's scale.  Otherwise old releases of ONNX Runtime compute wrong results in fused kernels, and newer
    releases do not fuse.

    Args:
        graph: changed in place.
        nodes: its nodes.
        growth: per weight, the growth of its scales.
        survey: the trace of the original model.
        captured: names that bodies of nodes read.

    Returns:
        Values that are no longer read.
    """
    replaced: set[ir.Value] = set()
    for node in nodes:
        weight, bias, source = input_of(node, WEIGHT), input_of(node, BIAS), maker_of(node, BIAS)
        if weight not in growth or bias is None or source is None or not is_dequantised(source):
            continue
        load = _load(source, survey)
        names = [v.name or "" if v is not None else "" for v in parts_of(source)]
        q, scale, factor = load(names[0]), load(names[1]), growth[weight]
        if q.dtype != np.int32 or factor.size not in (1, q.size):
            continue
        factor = factor.reshape(()) if factor.size == 1 else factor.reshape(-1)
        parts = {0: np.rint(q / factor).astype(q.dtype), 1: (scale * factor).astype(scale.dtype)}
        own = own_node(graph, bias, [(node, BIAS)])
        if parts[1].ndim > scale.ndim:  # one scale became one per channel
            own.attributes["axis"] = ir.AttrInt64("axis", 0)
        replaced |= _set(graph, [own], parts, captured)
    return replaced


def _set(
    graph: ir.Graph, holders: Sequence[ir.Node], parts: Mapping[int, Array], captured: Collection[str]
) -> set[ir.Value]:
    """Write parts into their holders; holders that read the same constant keep sharing it."""
    places: dict[tuple[ir.Value | None, int], list[Place]] = {}
    for holder in holders:
        for position in parts:
            node, slot = _place(graph, holder, position, parts[position])
            places.setdefault((node.inputs[slot], position), []).append((node, slot))
    replaced: set[ir.Value] = set()
    for (_, position), some in places.items():
        replaced |= set_operands(graph, some, parts[position], captured)
    return replaced


def _place(graph: ir.Graph, holder: ir.Node, position: int, part: Array) -> Place:
    """Return the operand that is a part of a weight: nodes before a Mul or a Reshape read some of them."""
    if holder.op_type == "Reshape":
        return _lookup(graph, holder, position, part)
    if holder.op_type != "Mul" or position:
        return holder, position
    return _before(graph, holder, 0), 0


def _before(graph: ir.Graph, node: ir.Node, slot: int) -> ir.Node:
    """Return the node that makes an input, or a copy of it for this node alone; its shape will change."""
    maker = own_node(graph, given(node, slot), [(node, slot)])
    maker.outputs[0].shape = None
    return maker


def _lookup(graph: ir.Graph, holder: ir.Node, position: int, part: Array) -> Place:
    """Return the operand that is a part of a weight of lookups; the blocks of its bytes may get nodes to name them."""
    if position == TARGET:
        return holder, 1
    product = _before(graph, holder, 0)
    if position == CODES:
        return _before(graph, _before(graph, product, 0), 1), 0
    scale = product.inputs[1]
    if scale is not None and scale.producer() is None:
        if position == SCALE:
            return product, 1
        _name_blocks(graph, product, scale, part)
    picked = _before(graph, product, 1)
    return (picked, 0) if position == SCALE else (_before(graph, picked, 1), 0)


def _name_blocks(graph: ir.Graph, product: ir.Node, scale: ir.Value, places: Array) -> None:
    """Let each byte of an output read the scale of a block that it names."""
    named = constant(graph, places, f"{scale.name}/places", old=scale)
    index = ir.Node("", "Cast", [named], [ir.AttrInt64("to", int(ir.DataType.INT32))])
    picked = ir.Node("", "Gather", [scale, index.outputs[0]], [ir.AttrInt64("axis", 1)])
    for node, end, kind in ((index, "index", ir.TensorType(ir.DataType.INT32)), (picked, "picked", scale.type)):
        node.name = node.outputs[0].name = free_name(graph, f"{scale.name}/{end}")
        node.outputs[0].type = kind
    graph.insert_before(product, [index, picked])
    product.replace_input_with(1, picked.outputs[0])


def _holders(graph: ir.Graph, stored: Stored, places: Sequence[Place]) -> dict[ir.Node, ir.Value]:
    """Return the nodes whose inputs are the parts, each with the value that these operands read.

    If other nodes read the value too, the chain from the DequantizeLinear on is copied for these operands.
    """
    if not stored.held:
        return {node: node.outputs[0] for node, _ in places}
    found: dict[ir.Value, list[Place]] = {}
    for node, position in places:
        found.setdefault(given(node, position), []).append((node, position))
    holders = {}
    for value, some in found.items():
        last = holder = own_node(graph, value, some)
        while not is_dequantised(holder):  # transposed after it
            holder = own_node(graph, given(holder, 0), [(holder, 0)])
            holder.outputs[0].shape = None
        holders[holder] = last.outputs[0]
    return holders


def _load(holder: ir.Node, survey: Survey) -> Load:
    values = {v.name: v for v in (*holder.inputs, *parts_of(holder)) if v is not None}

    def load(name: str) -> Array:
        array = constant_of(values.get(name), name, survey.facts)
        if array is None:
            raise RewriteError(f"the constant {name} has no value")
        return array

    return load
