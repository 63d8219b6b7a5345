"""Bring what layers read to one form: weights are initializers, no inputs, and nothing is read through a copy.

The legacy exporter of torch ties and deduplicates weights with Identity nodes, and others write one in place of each
dropout; exporters of PaddlePaddle write weights as Constant nodes.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.flatten.listed import FREE, NOTHING, Unlisted, unlist

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def direct(model: ir.Model, *, keep_inputs: bool = False) -> Unlisted:
    """Remove Identity nodes, and make Constant nodes of several floats initializers, in place.

    Outputs of the model stay what nodes compute.

    Args:
        model: changed in place.
        keep_inputs: weights that are also inputs stay inputs.

    Returns:
        The weights that are inputs no more.
    """
    unlisted, graph = NOTHING if keep_inputs else unlist(model), model.graph
    for node in list(graph):
        if node.domain or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            continue
        out = node.outputs[0]
        tensor = (
            node.attributes["value"].as_tensor() if node.op_type == "Constant" and "value" in node.attributes else None
        )
        if tensor is not None and tensor.dtype in FLOATS and tensor.size > 1:
            weight = ir.Value(
                name=out.name,
                shape=ir.Shape(tensor.shape.numpy()),
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            out.replace_all_uses_with(weight)
            graph.remove(node, safe=True)
            graph.initializers[weight.name or ""] = weight
            model.ir_version = max(model.ir_version, FREE)
        elif node.op_type == "Identity" and node.inputs[0] is not None:
            out.replace_all_uses_with(node.inputs[0])
            graph.remove(node, safe=True)
    return unlisted
