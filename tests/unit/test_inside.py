"""Channels inside heads in another basis: the same function, and without channels, that of projected heads."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrail.algebra.rotation import balanced
from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.proof import prove
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rotate.inside import QUERIES
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger
from tests.contract.attention import (
    SIZE,
)
from tests.inside import KERNELS, KINDS, NETS, found_in, projected, relative, turned
from tests.oracle import check_same, narrowed_equals_masked, passes_checker, run
from tests.tiny import feed


@pytest.mark.parametrize("name", NETS)
def test_another_basis_is_the_same_function(name: str) -> None:
    model = NETS[name]
    other, survey, bases = turned(model)
    assert len(bases) == (1 if name in KERNELS else 2)
    check_same(run(other, feed(model)), run(model, feed(model)))
    kinds = {block.kind for block in survey.blocks}
    assert kinds == ({"vo"} if name == "packed" or name in KERNELS else {"qk", "vo"})
    whys = {(refusal.op, refusal.reason) for refusal in found_in(model).refusals}
    assert whys == ({(name.partition(" ")[0], QUERIES)} if name in KERNELS else set())


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
