"""Budgets hold for the file that is written, in which bases that lose no channels have no matrices."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rotate.bridges import follow
from tests.prenorm import VOCABULARY, WIDTH, prenorm
from tests.tiny import tiny


def with_biases(model: ir.Model) -> ir.Model:
    """The model with a bias after every layer that reads a normalization: shifts of normalizations go there."""
    for node in [node for node in model.graph if node.op_type == "MatMul"]:
        read, weight = node.inputs
        if read is None or weight is None or weight.const_value is None or not (read.name or "").startswith("y"):
            continue
        made, width = node.outputs[0], weight.const_value.numpy().shape[1]
        bias = constant(model.graph, np.full(width, 0.1, np.float32), f"{made.name}/bias")
        add = ir.Node("", "Add", [made, bias], num_outputs=1, name=f"{made.name}/biased")
        follow(model.graph, add, made, [use.node for use in made.uses() if use.node is not add])
    return model


@pytest.mark.parametrize("percent", [92, 94, 96])
def test_normalizations_of_a_stream_that_stays_count_with_their_shifts(percent: int) -> None:
    model = with_biases(prenorm(depth=3))
    data = {"ids": np.random.default_rng(3).integers(0, VOCABULARY, (64, 6))}
    (name,) = [block["name"] for block in onnxgrail.inspect(model).blocks if block["kind"] == "stream"]
    whole = f"^{name}$|mlp$"
    result = onnxgrail.compress(model, data=data, target_params=f"{percent}%", exclude=whole, round_to=1)
    budget = result.report.data["model"]["budget"]
    assert result.report.data["model"]["params_after"] == budget["achieved"] <= budget["limit"]
    assert sum(node.op_type == "LayerNormalization" for node in result.model.graph) == 7


@pytest.mark.parametrize("percent", [85, 90, 95])
def test_channels_that_only_a_matrix_sets_free_count_with_it(percent: int) -> None:
    """A layer before an activation is a block only if a matrix stands between the activation and the stream."""
    layers = "".join(
        f"""
        y{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x{i}, g{i})
        h{i} = MatMul(y{i}, up{i})
        r{i} = Relu(h{i})
        d{i} = MatMul(r{i}, down{i})
        x{i + 1} = Add(x{i}, d{i})"""
        for i in range(2)
    )
    body = f"""
        a = MatMul(x, stem)
        x0 = Relu(a)
        {layers}
        z = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x2, g0)
        y = MatMul(z, head)"""
    shapes = {"stem": (40, WIDTH), "head": (WIDTH, 3), **{f"g{i}": (WIDTH,) for i in range(2)}}
    shapes |= {f"up{i}": (WIDTH, 40) for i in range(2)} | {f"down{i}": (40, WIDTH) for i in range(2)}
    model = tiny("float[N,5,40] x => float[] y", body, shapes)
    data = {"x": np.random.default_rng(3).normal(size=(64, 5, 40)).astype(np.float32)}
    blocks = onnxgrail.inspect(model, data=data).blocks
    (name,) = [block["name"] for block in blocks if block["kind"] == "stream"]
    whole = "|".join(f"^{block['name']}$" for block in blocks if block["units"] == 40 or block["name"] == name)
    result = onnxgrail.compress(model, data=data, target_params=f"{percent}%", exclude=whole, round_to=1)
    budget = result.report.data["model"]["budget"]
    assert result.report.data["model"]["params_after"] == budget["achieved"] <= budget["limit"]
