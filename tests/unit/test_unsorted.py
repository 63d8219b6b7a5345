"""Nodes that stand in front of what they read, which ONNX Runtime puts in order and so do we."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrail.graph.io.model_file import load
from tests.tiny import tiny

BODY = """a = MatMul (x, w0)
b = Relu (a)
c = If (flag) <
    then_branch = yes () => (float[N,8] u) { p = Relu (b)
        u = Neg (p) },
    else_branch = no () => (float[N,8] v) { q = Mul (b, b)
        v = Neg (q) }>
y = MatMul (c, w1)"""
SORTED = ["MatMul", "Relu", "If", "MatMul"]


def reorder(nodes: MutableSequence[onnx.NodeProto], order: Sequence[int]) -> None:
    found = [onnx.NodeProto.FromString(nodes[k].SerializeToString()) for k in order]
    del nodes[:]
    nodes.extend(found)


def shuffled(order: Sequence[int], *, inside: bool) -> onnx.ModelProto:
    weights = {"w0": (6, 8), "w1": (8, 4), "flag": np.array(True)}
    model: onnx.ModelProto = ir.to_proto(tiny("float[N,6] x => float[N,4] y", BODY, weights))
    for body in model.graph.node[2].attribute if inside else ():
        reorder(body.g.node, (1, 0))
    reorder(model.graph.node, order)
    return model


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3]], ids=["sorted", "reversed", "body first"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_loaded_graph_is_in_order(order: list[int], inside: bool) -> None:
    """Also where only a body reads what stands after its node, or a body itself is out of order."""
    graph = load(shuffled(order, inside=inside)).clone().graph  # onnx-ir clones what is in order only
    assert [node.op_type for node in graph] == SORTED
