"""Channels inside heads in another basis: the same function, and without channels, that of projected heads."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.algebra.rotation import balanced
from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.proof import prove
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger
from tests.contract.attention import HEADS, SIZE, TOKENS
from tests.inside import KERNELS, KINDS, NETS, found_in, projected, relative, turned
from tests.oracle import check_same, narrowed_equals_masked, passes_checker, run
from tests.tiny import feed, lines, tiny


@pytest.mark.parametrize("name", NETS)
def test_another_basis_is_the_same_function(name: str) -> None:
    model = NETS[name]
    other, survey, bases = turned(model)
    assert len(bases) == 2
    check_same(run(other, feed(model)), run(model, feed(model)))
    kinds = {block.kind for block in survey.blocks}
    assert kinds == ({"vo"} if name == "packed" else {"qk", "vo"})
    assert not found_in(model).refusals


@pytest.mark.parametrize("name", NETS)
def test_fewer_channels_are_a_projection_in_every_head(name: str) -> None:
    model = NETS[name]
    other, survey, bases = turned(model)
    dead = np.zeros(survey.ids, dtype=bool)
    for block in survey.blocks:
        assert (block.units, block.ranked in bases) == (4 if name == "packed" else SIZE, True)
        dead[block.ids[1:]] = True
    apply(other.graph, survey, Ledger(dead=dead, arrays={}))
    restore(other)
    want = run(projected(model, bases, 1), feed(model))
    check_same(run(other, feed(model)), want)
    assert np.abs(want["y"] - run(model, feed(model))["y"]).max() > 1e-3
    if passes_checker(ir.to_proto(model).SerializeToString()):
        onnx.checker.check_model(ir.to_proto(other), full_check=True)
    assert not any(node.metadata_props for node in other.graph)


@pytest.mark.parametrize("name", NETS)
def test_the_masked_network_proves_it(name: str) -> None:
    other, survey, _ = turned(NETS[name])
    trial = trial_of(other, survey, feed(other), ("CPUExecutionProvider",))
    assert prove(trial, survey.blocks, {block.name: 1 for block in survey.blocks}) == (survey.blocks, ())
    narrowed_equals_masked(other, feed(other), kinds=KINDS)


def test_products_that_share_queries_or_keys_have_one_basis() -> None:
    model = relative()
    other, survey, bases = turned(model)
    assert [name.rpartition("/")[2] for name in bases] == ["qk", "vo"]
    assert [(block.kind, block.units) for block in survey.blocks] == [("qk", SIZE), ("vo", SIZE)]
    check_same(run(other, feed(model)), run(model, feed(model)))
    narrowed_equals_masked(other, feed(other), kinds=KINDS)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_keeps_the_scale_of_its_heads(name: str) -> None:
    given = next(node for node in KERNELS[name].graph if node.op_type.endswith("Attention")).attributes.get("scale")
    scale = SIZE**-0.5 if given is None else given.as_float()
    other, survey, _ = turned(KERNELS[name])
    for kind, written in (("vo", given is not None), ("qk", True)):
        slim, dead = other.clone(), np.zeros(survey.ids, dtype=bool)
        dead[next(block.ids[1:] for block in survey.blocks if block.kind == kind)] = True
        apply(slim.graph, survey, Ledger(dead=dead, arrays={}))
        (node,) = [node for node in slim.graph if node.op_type.endswith("Attention")]
        assert ("scale" in node.attributes) == written
        assert not written or np.isclose(node.attributes["scale"].as_float(), scale)


def test_biases_in_a_kernel_count_as_those_before_it() -> None:
    size = SIZE * HEADS
    rng = np.random.default_rng(5)
    biases = rng.normal(size=3 * size).astype(np.float32)
    apart = dict(zip(("bq", "bk", "bv"), np.split(biases, 3), strict=True))
    projections = "".join(lines("$p = MatMul(x, w$p)\n", p=p) for p in "qkv")
    added = "".join(lines("$p1 = Add($p, b$p)\n", p=p) for p in "qkv")
    weights = dict.fromkeys(("wq", "wk", "wv", "wo"), (size, size))
    op = f"com.microsoft.MultiHeadAttention<num_heads={HEADS}>"
    signature, imports = f"float[N,{TOKENS},{size}] x => float[] y", {"com.microsoft": 1}
    models = [
        tiny(signature, f"{projections}o = {op}(q, k, v, b)\ny = MatMul(o, wo)", {**weights, "b": biases},
             imports=imports),
        tiny(signature, f"{projections}{added}o = {op}(q1, k1, v1)\ny = MatMul(o, wo)", {**weights, **apart},
             imports=imports),
    ]  # fmt: skip
    x = rng.normal(size=(16, TOKENS, size)).astype(np.float32)
    found = [
        onnxgrail.compress(model, data={"x": x}, unit_ratio=0.5, blocks=("qk",), round_to=1).model for model in models
    ]
    check_same(run(found[0], {"x": x}), run(found[1], {"x": x}))


def test_weights_of_several_layers_stay_one() -> None:
    model = NETS["shared layers"]
    (queries, values) = found_in(model).heads.values()
    assert [len(one.products) for one in (queries, values)] == [2, 2]
    assert [len(one.measured) for one in (queries, values)] == [4, 2]
    other, _, _ = turned(model)
    assert {v.name for v in other.graph.initializers.values()} == {v.name for v in model.graph.initializers.values()}


def test_the_basis_keeps_what_products_need() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(500, 6)) * rng.uniform(0.1, 3, 6) @ rng.normal(size=(6, 6)) for _ in range(2))
    basis = balanced(x.T @ x, y.T @ y)
    want, left, right = x @ y.T, x @ basis, y @ np.linalg.inv(basis).T
    np.testing.assert_allclose(left @ right.T, want, atol=1e-6 * np.abs(want).max())
    _u, s, _v = np.linalg.svd(want)
    for kept in range(1, 6):
        lost = np.linalg.norm(left[:, :kept] @ right[:, :kept].T - want)
        np.testing.assert_allclose(lost, np.linalg.norm(s[kept:]), rtol=0.05)
