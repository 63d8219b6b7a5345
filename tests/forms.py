"""The same network written in another way."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir


def as_nodes(model: ir.Model, wanted: Callable[[ir.Value], bool] = lambda _: True) -> ir.Model:
    """The model with its weights, or some of them, as Constant nodes of the same names, as PaddlePaddle writes them."""
    for value in [value for value in model.graph.initializers.values() if wanted(value)]:
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], name=value.name)
        value.replace_all_uses_with(node.outputs[0])
        del model.graph.initializers[value.name]
        node.outputs[0].name = value.name
        model.graph.insert_before(model.graph[0], node)
    return model
