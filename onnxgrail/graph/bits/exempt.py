"""Let some layers of a model with quantize and dequantize nodes compute in float again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import given, input_of, integer, maker_of, numbers_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name

BACK, THERE = "DequantizeLinear", "QuantizeLinear"
PASSED = ("Relu", "Clip")  # between a layer and the rounding of its output
STORED = "_quantized"  # with which the tool ends the name of a rounded weight
FLOAT = "_float"  # end of the name of what a layer in float reads beside others


def exempted(
    model: ir.Model,
    original: ir.Model,
    layers: Collection[str],
    kinds: Collection[str],
    whole: Collection[str] = (),
) -> ir.Model:
    """Return a copy in which some layers read float weights and unrounded inputs.

    A tensor stays rounded where a quantized layer reads or writes it, as the tool for static quantization leaves it.
    Nodes that are no layers read unrounded constants, too: a runtime would convert these back in each run.

    Args:
        model: with `QuantizeLinear` and `DequantizeLinear` around its layers; not changed.
        original: the float model that it was made from: it has the same names, and the weights.
        layers: names of the nodes that compute in float.
        kinds: operators whose nodes are layers.
        whole: operators among `kinds` whose kernels write integers only: what they write is rounded for all readers.
    """
    made = model.clone()
    graph, weights = made.graph, original.graph.initializers
    for node in list(graph):
        if node.op_type in (BACK, THERE) or (node.op_type in kinds and node.name not in layers):
            continue
        for slot, value in enumerate(node.inputs):
            source = (_read(value) if node.name in layers else None) or _constant(value, weights, graph)
            maker = source.producer() if source is not None else None
            if source is not None and (maker is None or maker.op_type not in whole or maker.name in layers):
                node.replace_input_with(slot, source)
    rounded = _touched(node for node in graph if node.op_type in kinds and node.name not in layers)
    for node in list(graph):
        value = node.inputs[0] if node.op_type == THERE else None
        if value is None or value in rounded:
            continue
        for reader in [use.node for use in node.outputs[0].uses()]:
            back = reader.outputs[0]
            if back.is_graph_output():
                value.name, back.name = back.name, value.name
                value.type, value.shape = back.type, back.shape  # the tool declares them for outputs only
            back.replace_all_uses_with(value, replace_graph_outputs=True)
    _sweep(graph)
    for node in [node for node in graph if node.name in layers]:
        _apart(node, graph)
    _sweep(graph)
    return made


def _apart(node: ir.Node, graph: ir.Graph) -> None:
    """Let a layer in float read a rounded tensor through equal scales of its channels if its output is rounded, too.

    Between tensors with one scale each, ONNX Runtime rounds the weights of a layer, with one scale for all of them.
    """
    back = maker_of(node, 0)
    channels = _channels(node)
    if not channels or back is None or back.op_type != BACK:
        return
    readers = [use.node for use in node.outputs[0].uses()]
    while len(readers) == 1 and readers[0].op_type in PASSED:
        readers = [use.node for use in readers[0].outputs[0].uses()]
    if [reader.op_type for reader in readers] != [THERE]:
        return
    values = [given(back, place) for place in range(1, len(back.inputs))]
    parts = [constant(graph, np.full(channels, numbers_of(v)), f"{v.name}{FLOAT}") for v in values]
    name = free_name(graph, f"{back.outputs[0].name}{FLOAT}")
    own = ir.Node("", BACK, [back.inputs[0], *parts], [ir.AttrInt64("axis", 1)], name=name)
    own.outputs[0].name, own.outputs[0].type = name, back.outputs[0].type
    graph.insert_before(node, own)
    node.replace_input_with(0, own.outputs[0])


def _channels(node: ir.Node) -> int:
    """Return the number of channels on the second axis of a layer's input; 0 for other nodes, or if it is not known."""
    value = input_of(node, 1)
    weight = value.const_value if value is not None else None
    if weight is None or integer(node, "transA"):
        return 0
    sizes: tuple[int, ...] = weight.numpy().shape
    if node.op_type == "Conv":
        return sizes[1] * integer(node, "group", 1)
    return sizes[integer(node, "transB")] if node.op_type in ("ConvTranspose", "Gemm") else 0


def _constant(value: ir.Value | None, weights: Mapping[str, ir.Value], graph: ir.Graph) -> ir.Value | None:
    """Return the float constant of which a value is the rounded one, None for other values."""
    back = value.producer() if value is not None else None
    if back is None or back.op_type != BACK:
        return None
    stored = back.inputs[0]
    name = (stored.name or "").removesuffix(STORED) if stored is not None else ""
    if name not in weights:
        return None
    own = f"{name}{FLOAT}" if name == back.outputs[0].name else name  # the tool names a bias like its float tensor
    if own not in graph.initializers:
        old = weights[name]
        graph.register_initializer(ir.Value(name=own, type=old.type, shape=old.shape, const_value=old.const_value))
    return graph.initializers[own]


def _touched(layers: Iterable[ir.Node]) -> set[ir.Value]:
    """Return the float tensors that quantized layers read or write."""
    found: set[ir.Value] = set()
    for node in layers:
        found.update(source for value in node.inputs if (source := _read(value)) is not None)
        found.update(node.outputs)
    return found


def _read(value: ir.Value | None) -> ir.Value | None:
    """Return the float tensor of which an input is the rounded value, None for weights and unrounded inputs."""
    back = value.producer() if value is not None else None
    stored = back.inputs[0] if back is not None and back.op_type == BACK else None
    there = stored.producer() if stored is not None else None
    return there.inputs[0] if there is not None and there.op_type == THERE else None


def _sweep(graph: ir.Graph) -> None:
    """Remove nodes and weights that nothing reads any more."""
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs and not value.is_graph_input():
            del graph.initializers[name]
