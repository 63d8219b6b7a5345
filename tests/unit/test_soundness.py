"""Graphs that say what cannot be: refused on loading, with the node or the name."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnxgrail.errors import ModelError
from onnxgrail.graph.io.model_file import load


def graph(*nodes, outputs=("y",)):
    """A model with one matrix, some more nodes, and these outputs."""
    first = helper.make_node("MatMul", ["x", "w"], ["y"], name="first")
    ends = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
    weight = numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    ports = [helper.make_tensor_value_info("x", 1, ["N", 4])]
    made = helper.make_graph([first, *nodes], "g", ports, ends, [weight])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def constant(**value):
    return helper.make_node("Constant", [], ["k"], **value)


def renamed(node, name="value"):
    node.attribute[0].name = name
    return node


def in_body(node):
    """The node in a branch."""
    body = helper.make_graph([node], "b", [], [helper.make_tensor_value_info(node.output[0], 1, None)])
    return helper.make_node("If", ["flag"], ["z"], then_branch=body, else_branch=body)


def referring():
    node = helper.make_node("Softmax", ["y"], ["z"], axis=1)
    node.attribute[0].ref_attr_name = "axis"
    return node


VALUES = {"INT": 1, "INTS": [1, 2], "FLOAT": 1.5, "FLOATS": [0.5, 1.5], "STRING": "a", "STRINGS": ["a", "b"]}
SPARSE = helper.make_sparse_tensor(
    numpy_helper.from_array(np.ones(1, np.float32), "v"), numpy_helper.from_array(np.ones(1, np.int64), "i"), [4]
)


@pytest.mark.parametrize("kind", VALUES)
def test_a_constant_of_another_type_than_its_attribute(kind):
    node = renamed(constant(**{f"value_{kind.lower()}": VALUES[kind]}))
    with pytest.raises(
        ModelError, match=rf"the attribute 'value' of the node 'k' \(Constant\) is {kind}, expected TENSOR"
    ):
        load(graph(node))


@pytest.mark.parametrize("kind", VALUES)
def test_constants_of_all_kinds_are_taken(kind):
    load(graph(constant(**{f"value_{kind.lower()}": VALUES[kind]})))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            helper.make_node("Softmax", ["y"], ["z"], axis=1.5),
            r"'axis' of the node 'z' \(Softmax\) is FLOAT, expected INT",
        ),
        (helper.make_node("Transpose", ["y"], ["z"], name="t", perm="x"), "'t' .* is STRING, expected INTS"),
        (in_body(helper.make_node("Flatten", ["y"], ["t"], axis="x")), r"'t' \(Flatten\) is STRING, expected INT"),
        (referring(), "'axis' .* refers to an attribute of a function"),
        (constant(sparse_value=SPARSE), "'sparse_value' .* is a sparse tensor, which is not supported"),
    ],
)
def test_attributes_that_cannot_be(node, text):
    with pytest.raises(ModelError, match=text):
        load(graph(node))


def test_attributes_of_other_domains_are_not_known():
    load(graph(helper.make_node("Softmax", ["y"], ["z"], domain="other", axis=1.5)))


@pytest.mark.parametrize("outputs", [("nope",), ("y", "nope"), ("",)])
def test_outputs_that_nothing_makes(outputs):
    with pytest.raises(ModelError, match=f"nothing in the graph makes the output '{outputs[-1]}'"):
        load(graph(outputs=outputs))


@pytest.mark.parametrize("outputs", [("y", "x"), ("y", "w"), ("y", "y")])
def test_outputs_that_are_there_without_a_node(outputs):
    assert [value.name for value in load(graph(outputs=outputs)).graph.outputs] == list(outputs)
