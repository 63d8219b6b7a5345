"""Find the tensor at which the effect of a changed activation is measured."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.cost.counting import PRODUCTS
from onnxgrail.graph.trace.facts import Facts, captures

FAR = 400  # nodes visited


def judge_at(model: ir.Model, output: ir.Value, position: int, facts: Facts) -> str:
    """Return the first tensor after a product with `output` through which everything computed from it passes.

    For a convolution in a residual branch that is the output of the next convolution; for the norm before an attention,
    the attention's output; if that is added to a residual, the sum.  Without such a tensor nearby it is `output`
    itself.
    """
    reach, left = {output.name}, {output.name: _readers(output)}
    contracted = False
    nodes = list(model.graph)[position + 1 :]
    for node in nodes[:FAR]:
        read = ({v.name for v in node.inputs if v is not None} | captures(node)) & reach
        if not read:
            continue
        for name in read:
            left[name] -= sum(v is not None and v.name == name for v in node.inputs) or 1
        contracted |= node.op_type in PRODUCTS or "MatMul" in node.op_type
        if node.op_type not in ("Shape", "Size"):
            reach |= {v.name for v in node.outputs if v.name}
            left |= {v.name: _readers(v) for v in node.outputs if v.name and _readers(v)}
        live = [name for name in reach if left.get(name, 0) > 0]
        if not live:
            break
        mine = next((v for v in node.outputs if [v.name] == live), None)
        if mine is not None and (contracted or mine.is_graph_output()) and _is_float(mine, facts):
            return _joined(mine, facts)
    return output.name or ""


def _readers(value: ir.Value) -> int:
    """Count the readers of a value, with the model's output as one."""
    return len(value.uses()) + value.is_graph_output()


def _is_float(value: ir.Value, facts: Facts) -> bool:
    dtype = facts.dtypes.get(value.name or "")
    return dtype is not None and dtype.kind == "f" and len(facts.shapes[value.name or ""]) > 1


def _joined(value: ir.Value, facts: Facts) -> str:
    """Follow a value through the Add of a bias and the Add of a residual, while that Add is the only reader."""
    for _ in range(2):
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != "Add":
            break
        total = uses[0].node.outputs[0]
        if not _is_float(total, facts):
            break
        value = total
    return value.name or ""
