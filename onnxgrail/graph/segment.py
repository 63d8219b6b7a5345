"""Cut a runnable piece out of a graph between named tensors."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrail.graph.facts import Facts


def cut(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], facts: Facts) -> ir.Model:
    """A new model that computes `outputs` from `inputs`; weights are shared with the old one, nodes are copies.

    Raises:
        ValueError: the inputs do not determine the outputs.
    """
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    for value in [*graph.inputs, *graph.outputs]:
        name = value.name or ""
        if name in facts.shapes:  # the runtime wants an element type; sizes stay open
            value.type = ir.TensorType(ir.DataType.from_numpy(facts.dtypes[name]))
            value.shape = ir.Shape(_declared(name, facts))
    piece = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    graph.opset_imports.update(model.opset_imports)
    return piece


def _declared(name: str, facts: Facts) -> list[int | None]:
    """Sizes stay open, except how many numbers a target shape has: the runtime infers ranks from that."""
    shape = facts.shapes[name]
    if len(shape) == 1 and facts.dtypes[name].kind in "iu" and name in facts.values and name not in facts.varying:
        return list(shape)
    return [None] * len(shape)
