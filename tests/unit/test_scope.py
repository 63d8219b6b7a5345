"""Module paths out of what exporters note about nodes, and out of what others write there."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxgrail.graph.notes import common_scope, scope


def node(scopes: str | None, name: str = "/encoder/dense/MatMul") -> ir.Node:
    made = ir.node("Relu", [ir.val("x")], name=name)
    if scopes is not None:
        made.metadata_props["pkg.torch.onnx.name_scopes"] = scopes
    return made


@pytest.mark.parametrize(
    ("scopes", "path"),
    [
        ("['', 'layer', 'layer.0', 'linear']", "layer.0"),
        (str(["", "it's", "relu"]), "it's"),
        ("['', 'linear']", "encoder.dense"),
        (None, "encoder.dense"),
        ("1e999", "encoder.dense"),
        ("[1, 2, 3]", "encoder.dense"),
        ("['never', 'closed", "encoder.dense"),
        ("-" * 7000 + "1", "encoder.dense"),
    ],
)
def test_the_scope_of_a_node(scopes: str | None, path: str) -> None:
    assert scope(node(scopes)) == path


def test_the_scope_that_nodes_share() -> None:
    assert common_scope([node("['m', 'm.a', 'm.a.q', 'k']"), node("['m', 'm.a', 'm.a.v', 'k']")]) == "m.a"
    assert common_scope([node("['m.a', 'k']"), node("['n.b', 'k']")]) == "m.a"
