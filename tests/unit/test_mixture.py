"""Mixtures of experts in one node: what nobody sees of them is computed, and they are counted and narrowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.stream.probing import experts_of, hidden
from onnxgrail.core import Array
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import dead_of
from onnxgrail.graph.rewrite import weights
from tests.contract.cases_experts import packed
from tests.oracle import run, survey_of
from tests.tiny import Weights, feed, tiny

EXPERTS, INNER, WIDTH = 3, 12, 8
GATED = 'activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.7, activation_beta=1.0, swiglu_limit=0.5'
FLOATS: Weights = {
    "up": (EXPERTS, INNER, WIDTH),
    "b_up": (EXPERTS, INNER),
    "down": (EXPERTS, WIDTH, INNER),
    "router": (WIDTH, EXPERTS),
}
NODES = {
    "relu": ('MoE<k=2, activation_type="relu">(x, r, up, b_up, down)', FLOATS),
    "gelu": ('MoE<k=1, activation_type="gelu">(x, r, up, b_up, down)', FLOATS),
    "silu": ('MoE<k=2, activation_type="silu", normalize_routing_weights=1>(x, r, up, , down)', FLOATS),
    "swiglu": (f"MoE<k=2, {GATED}>(x, r, up, b_up, down)", {**FLOATS, "up": (3, 24, 8), "b_up": (3, 24)}),
    "packed": (
        'QMoE<k=2, activation_type="relu", expert_weight_bits=4>(x, r, q_up, s_up, , q_down, s_down)',
        {**packed(INNER, 4), "router": (WIDTH, EXPERTS)},
    ),
}


def mixture(kind: str, end: str = "y = Identity(z)", more: Weights | None = None) -> ir.Model:
    node, given = NODES[kind]
    used = {name: weight for name, weight in given.items() if name in node or name == "router"}
    return tiny(
        f"float[N,{WIDTH}] x => float[] y",
        f"r = MatMul(x, router)\nz = com.microsoft.{node}\n{end}",
        {**used, **(more or {})},
        imports={"com.microsoft": 1},
        recorded=False,
    )


@pytest.mark.parametrize("kind", NODES)
def test_hidden_activations_are_those_of_the_runtime(kind: str) -> None:
    """The last matrices, applied to them, give what the node gives."""
    model = mixture(kind)
    given = feed(model, N=20)
    survey = survey_of(model, given)
    node = next(n for n in model.graph if n.domain)
    experts = experts_of(node, model, survey, weights.empty(survey))
    tensors = given | {"r": given["x"] @ model.graph.initializers["router"].const_value.numpy()}
    down = weights.original("q_down" if kind == "packed" else "down", model, survey)
    mask = np.arange(20) < 15
    for part, counted in ((None, slice(None)), (mask, mask)):
        rows = list(hidden(experts, tensors, part))
        summed = sum(matrix @ some.sum(axis=0) for matrix, some in zip(down, rows, strict=True))
        expected = run(model, given)["y"][counted].sum(axis=0)
        np.testing.assert_allclose(summed, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_what_is_counted() -> None:
    model = mixture("swiglu")
    given = feed(model, N=5)
    survey = survey_of(model, given)
    node = next(n for n in model.graph if n.domain)
    each = 2 * INNER * WIDTH + INNER * WIDTH
    assert counting.node_macs(node, survey, None) == 5 * 2 * each
    (block,) = survey.blocks
    assert counting.node_macs(node, survey, dead_of(survey, {block.name: 3})) == 5 * 2 * each // 4
    four = mixture("packed")
    assert counting.parameters(four) == WIDTH * EXPERTS + 2 * EXPERTS * INNER * WIDTH


@pytest.mark.parametrize("kind", ["swiglu", "packed"])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"compensate": "grail"},
        {"compensate": "grail", "reducer": "fold"},
        {"compensate": "none", "selector": "gram"},
    ],
    ids=["best", "grail", "fold", "none"],
)
def test_experts_are_compressed(tmp_path: Path, kind: str, choices: dict[str, Any]) -> None:
    model = mixture(kind, "a = Add(x, z)\ny = MatMul(a, head)", {"head": (WIDTH, 4)})
    ir.save(model, tmp_path / "m.onnx")
    data: dict[str, Array] = feed(model, N=64)
    np.savez(tmp_path / "x.npz", **data)
    result = onnxgrail.compress(
        tmp_path / "m.onnx", tmp_path / "s.onnx", unit_ratio=0.5, round_to=1, data=tmp_path / "x.npz", **choices
    )
    (block,) = [b for b in result.report.data["blocks"] if b["kept"] < b["units"]]
    assert block["kept"] * 2 == block["units"]
    y, slim = (run((tmp_path / name).read_bytes(), data)["y"] for name in ("m.onnx", "s.onnx"))
    assert (y * slim).sum() > 0.9 * np.linalg.norm(y) * np.linalg.norm(slim)
