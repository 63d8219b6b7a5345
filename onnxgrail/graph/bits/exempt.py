"""Let some layers of a model with quantize and dequantize nodes compute in float again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx_ir as ir

BACK, THERE = "DequantizeLinear", "QuantizeLinear"


def exempted(model: ir.Model, original: ir.Model, layers: Collection[str], kinds: Collection[str]) -> ir.Model:
    """Return a copy in which some layers read float weights and unrounded inputs.

    A tensor stays rounded where a quantized layer reads or writes it, as the tool for static quantization leaves it.

    Args:
        model: with `QuantizeLinear` and `DequantizeLinear` around its layers; not changed.
        original: the float model that it was made from: it has the same names, and the weights.
        layers: names of the nodes that compute in float.
        kinds: operators whose nodes are layers.
    """
    made = model.clone()
    graph, weights = made.graph, original.graph.initializers
    ours = [node for node in graph if node.name in layers]
    for node in ours:
        for slot, value in enumerate(node.inputs):
            source = _unrounded(value, weights, graph)
            if source is not None:
                node.replace_input_with(slot, source)
    rounded = _touched(node for node in graph if node.op_type in kinds and node.name not in layers)
    for node in list(graph):
        value = node.inputs[0] if node.op_type == THERE else None
        if value is None or value in rounded:
            continue
        for reader in [use.node for use in node.outputs[0].uses()]:
            for use in list(reader.outputs[0].uses()):
                use.node.replace_input_with(use.idx, value)
            _hand_over(graph, reader.outputs[0], value)
    _sweep(graph)
    return made


def _unrounded(value: ir.Value | None, weights: dict[str, ir.Value], graph: ir.Graph) -> ir.Value | None:
    """Return what a value was before it was rounded, None if it was not rounded."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != BACK:
        return None
    stored = node.inputs[0]
    writer = stored.producer() if stored is not None else None
    if writer is not None:
        return writer.inputs[0] if writer.op_type == THERE else None
    name = (stored.name or "").removesuffix("_quantized") if stored is not None else ""
    if name not in weights:
        return None
    if name not in graph.initializers:
        old = weights[name]
        graph.register_initializer(ir.Value(name=name, type=old.type, shape=old.shape, const_value=old.const_value))
    return graph.initializers[name]


def _touched(layers: Iterable[ir.Node]) -> set[ir.Value]:
    """Return the float tensors that quantized layers read or write through rounding."""
    found: set[ir.Value] = set()
    for node in layers:
        for value in node.inputs:
            back = value.producer() if value is not None else None
            there = back.inputs[0].producer() if back is not None and back.op_type == BACK and back.inputs[0] else None
            if there is not None and there.inputs[0] is not None:
                found.add(there.inputs[0])
        found.update(node.outputs)
        found.update(u.node.outputs[0] for v in node.outputs for u in v.uses() if u.node.op_type in ("Relu", "Clip"))
    return found


def _hand_over(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Make a value an output of the graph in place of another, under its name."""
    for index, output in enumerate(graph.outputs):
        if output is old:
            new.name, old.name = old.name, new.name
            graph.outputs[index] = new


def _sweep(graph: ir.Graph) -> None:
    """Remove nodes and weights that nothing reads any more."""
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs and not value.is_graph_input():
            del graph.initializers[name]
