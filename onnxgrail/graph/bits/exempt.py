"""Let some layers of a model with quantize and dequantize nodes compute in float again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx_ir as ir

BACK, THERE = "DequantizeLinear", "QuantizeLinear"
STORED = "_quantized"  # with which the tool ends the name of a rounded weight
FLOAT = "_float"  # end of the name of a weight whose name the tool has used


def exempted(
    model: ir.Model, original: ir.Model, layers: Collection[str], kinds: Collection[str], after: Collection[str] = ()
) -> ir.Model:
    """Return a copy in which some layers read float weights and unrounded inputs.

    A tensor stays rounded where a quantized layer reads or writes it, as the tool for static quantization leaves it.

    Args:
        model: with `QuantizeLinear` and `DequantizeLinear` around its layers; not changed.
        original: the float model that it was made from: it has the same names, and the weights.
        layers: names of the nodes that compute in float.
        kinds: operators whose nodes are layers.
        after: operators whose outputs are rounded if they directly follow a quantized layer.
    """
    made = model.clone()
    graph, weights = made.graph, original.graph.initializers
    ours = [node for node in graph if node.name in layers]
    for node in ours:
        for slot, value in enumerate(node.inputs):
            source = _unrounded(value, weights, graph)
            if source is not None:
                node.replace_input_with(slot, source)
    rounded = _touched((node for node in graph if node.op_type in kinds and node.name not in layers), after)
    for node in list(graph):
        value = node.inputs[0] if node.op_type == THERE else None
        if value is None or value in rounded:
            continue
        for reader in [use.node for use in node.outputs[0].uses()]:
            back = reader.outputs[0]
            if back.is_graph_output():
                value.name, back.name = back.name, value.name
            back.replace_all_uses_with(value, replace_graph_outputs=True)
    _sweep(graph)
    return made


def _unrounded(value: ir.Value | None, weights: Mapping[str, ir.Value], graph: ir.Graph) -> ir.Value | None:
    """Return what a value was before it was rounded, None if it was not rounded."""
    before = _read(value)
    back = value.producer() if value is not None else None
    if before is not None or back is None or back.op_type != BACK:
        return before
    stored = back.inputs[0]
    name = (stored.name or "").removesuffix(STORED) if stored is not None else ""
    if name not in weights:
        return None
    own = f"{name}{FLOAT}" if name == back.outputs[0].name else name  # the tool names a bias like its float tensor
    if own not in graph.initializers:
        old = weights[name]
        graph.register_initializer(ir.Value(name=own, type=old.type, shape=old.shape, const_value=old.const_value))
    return graph.initializers[own]


def _touched(layers: Iterable[ir.Node], after: Collection[str]) -> set[ir.Value]:
    """Return the float tensors that quantized layers, and what directly follows them, read or write."""
    found: set[ir.Value] = set()
    for node in layers:
        found.update(source for value in node.inputs if (source := _read(value)) is not None)
        found.update(node.outputs)
        for output in node.outputs:
            next_ones = [use.node for value in _rounded(output) for use in value.uses()]
            found.update(one.outputs[0] for one in next_ones if one.op_type in after)
    return found


def _read(value: ir.Value | None) -> ir.Value | None:
    """Return the float tensor of which an input is the rounded value, None for weights and unrounded inputs."""
    back = value.producer() if value is not None else None
    stored = back.inputs[0] if back is not None and back.op_type == BACK else None
    there = stored.producer() if stored is not None else None
    return there.inputs[0] if there is not None and there.op_type == THERE else None


def _rounded(value: ir.Value) -> Iterable[ir.Value]:
    """Yield a tensor and its rounded values."""
    yield value
    for use in value.uses():
        if use.node.op_type == THERE:
            yield from (reader.node.outputs[0] for reader in use.node.outputs[0].uses())


def _sweep(graph: ir.Graph) -> None:
    """Remove nodes and weights that nothing reads any more."""
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs and not value.is_graph_input():
            del graph.initializers[name]
