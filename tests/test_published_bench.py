"""The re-implementations of published methods: at full size they change nothing, and each does what its paper says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from bench.published import llama, methods, page, pruning
from bench.published.__main__ import ALONE, METHODS, judged, nearest
from bench.published.methods import Dense, Plan
from onnxgrail.models import load

MODEL = load("char_llama")
SAMPLES = 4


@pytest.fixture(scope="module")
def dense() -> Dense:
    with np.load(MODEL.calibration) as archive:
        return methods.measured(llama.read(MODEL.model), archive["input_ids"][:SAMPLES])


def exact(dense: Dense) -> Any:
    return ort.InferenceSession(MODEL.model).run(None, {"input_ids": dense.ids})[0]


def test_the_network_in_numpy_is_that_of_the_file(dense: Dense) -> None:
    np.testing.assert_allclose(llama.logits(dense.net, dense.ids), exact(dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_changes_at_full_size(dense: Dense, name: str) -> None:
    if name.startswith("SVD-LLM"):  # factors of full rank have more parameters than the matrix
        ranks = {name: min(getattr(dense.net.layers[0], name)[0].shape) for name in llama.MATRICES}
        net = methods.factored(dense, ranks, update=name.endswith("update"))
    else:
        first, *_ = METHODS[name](dense).values()
        net = max(first, key=lambda plan: plan.params).make()
    np.testing.assert_allclose(llama.logits(net, dense.ids), exact(dense), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", METHODS)
def test_arrays_have_the_parameters_of_the_plan(dense: Dense, name: str) -> None:
    half = llama.parameters(dense.net) // 2
    reached = [plan for plans in METHODS[name](dense).values() if (plan := nearest(plans, half))]
    for plan in reached[:1] + reached[1:][-1:]:
        net = plan.make()
        assert llama.parameters(net) == plan.params
        assert np.isfinite(llama.logits(net, dense.ids[:2])).all()
    assert reached


def test_a_plan_never_has_fewer_parameters_nor_many_more() -> None:
    plans = [Plan(params=size, make=lambda: None) for size in (90, 101, 104)]  # type: ignore[arg-type, return-value]
    assert getattr(nearest(plans, 100), "params", 0) == 101
    assert getattr(nearest(plans, 102), "params", 0) == 104
    assert nearest(plans, 95) is None
    assert nearest(plans, 105) is None


def test_slicing_with_one_rotation_is_a_projection_of_the_stream(dense: Dense) -> None:
    net = methods.sliced(dense, 96, 0, one=True)
    E = methods.basis(dense, 96)
    P = E @ E.T
    layers = [replace(x, o=(x.o[0] @ P,), down=(x.down[0] @ P,)) for x in dense.net.layers]
    whole = llama.widened(dense.net, embedding=dense.net.embedding @ P, layers=tuple(layers))
    np.testing.assert_allclose(llama.logits(net, dense.ids), llama.logits(whole, dense.ids), rtol=1e-3, atol=2e-3)


def test_truncated_singular_values_are_the_loss_of_outputs(dense: Dense) -> None:
    W, G = dense.net.layers[1].down[0].astype(np.float64), dense.moments[1]["h"]
    first, second = methods.whitened(W, G, 40)
    far = W - first @ second
    values = np.linalg.svd(np.linalg.cholesky(methods.damped(G)).T @ W, compute_uv=False)
    assert np.trace(far.T @ methods.damped(G) @ far) == pytest.approx((values[40:] ** 2).sum(), rel=1e-6)


def test_updates_of_the_surgeon_are_the_ridge_fit_towards_the_pruned_matrix(dense: Dense) -> None:
    W, H = dense.net.layers[2].o[0].astype(np.float64), methods.damped(dense.moments[2]["a"], 0.01)
    groups, new = pruning.eliminated(dense.net.layers[2].o[0], dense.moments[2]["a"], 4, 2)
    kept = pruning.rows_of(dense.net.layers[2], groups)
    gone = np.setdiff1d(np.arange(len(W)), kept)
    wanted = W[kept] + np.linalg.solve(H[np.ix_(kept, kept)], H[np.ix_(kept, gone)] @ W[gone])
    np.testing.assert_allclose(new[kept], wanted, rtol=1e-4, atol=1e-5)
    assert not new[gone].any()


def test_the_bias_of_flap_is_the_mean_of_what_is_removed(dense: Dense) -> None:
    plans = pruning.flap(dense)[""]
    net = plans[300].make()
    for layer, new, means in zip(dense.net.layers, net.layers, dense.means, strict=True):
        if new.bias_down is not None:
            left = means["h"] @ layer.down[0] - new.bias_down
            kept = [int(np.flatnonzero((layer.down[0] == row).all(axis=1))[0]) for row in new.down[0]]
            np.testing.assert_allclose(left, means["h"][kept] @ new.down[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("keep", [1, 6])
def test_modegpt_keeps_the_heads_of_pairs_and_the_best_joint_directions(dense: Dense, keep: int) -> None:
    layer, C = dense.net.layers[0], dense.moments[0]["z"]
    new = pruning.picked(layer, C, keep)
    for group, pairs in enumerate(new.pairs):
        columns = np.concatenate([16 * group + pairs, 16 * group + 8 + pairs])
        np.testing.assert_array_equal(new.k[0].reshape(128, 4, -1)[:, group], layer.k[0][:, columns])
    joint = pruning.joined(layer, C, keep)
    root = np.linalg.cholesky(methods.damped(C)).T
    for group in range(4):
        before, after = (
            root @ x.v[0].reshape(128, 4, -1)[:, group] @ x.o[0].reshape(4, 2, -1, 128)[group, 0].astype(np.float64)
            for x in (layer, joint)
        )
        others = root @ layer.v[0].reshape(128, 4, -1)[:, group] @ layer.o[0].reshape(4, 2, -1, 128)[group, 1]
        values = np.linalg.svd(np.concatenate([before, others], axis=1), compute_uv=False)
        assert np.linalg.norm(before - after) <= np.linalg.norm(values[keep:]) * 1.001


def test_shares_of_layers_keep_the_total_below_the_largest_ratio() -> None:
    ratios = pruning.capped(2.4, np.array([8.0, 1.0, 1.0, 2.0]))
    assert sum(ratios) == pytest.approx(2.4)
    assert ratios[0] == pruning.MOST
    assert ratios[3] == pytest.approx(2 * ratios[1])


def test_a_row_has_its_difference_in_the_same_samples(dense: Dense) -> None:
    plans = {"": [Plan(params=100, make=lambda: dense.net)]}
    others = np.column_stack([np.full(64, 128.0), np.full(64, 128.0)])
    with pytest.raises(AssertionError, match="not those of the plan"):
        judged(dense, plans, 100, others)
    size = llama.parameters(dense.net)
    row = judged(dense, {"": [Plan(params=size, make=lambda: dense.net)]}, size, others)
    low, high = row["more"]
    assert low < row["perplexity"] - np.e < high
    assert row["perplexity"] == pytest.approx(3.477, abs=5e-3)


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    return data


def test_the_results_are_of_this_model_at_equal_parameters(committed: dict[str, Any], dense: Dense) -> None:
    assert committed["model"]["params"] == llama.parameters(dense.net)
    sizes = {row["size"]: row["params"] for row in committed["rows"] if row["method"] == page.OURS}
    assert set(sizes) == {"70%", "50%", "30%"}
    rows = {(row["method"], row["size"]): row for row in committed["rows"]}
    assert set(rows) == {(method, size) for method in (page.OURS, *ALONE, *METHODS) for size in sizes}
    for (method, size), row in rows.items():
        least = 0.97 if method in ALONE else 1.0
        assert least * sizes[size] <= row["params"] <= 1.03 * sizes[size]


def test_the_section_is_that_of_the_results(committed: dict[str, Any]) -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "fidelity.md").read_text(encoding="utf-8")
    assert page.table(committed) in text, "run `python -m bench.fidelity --page-only`"
    for row in committed["rows"]:
        begin = f"| {row['method']} | "
        (line,) = [line for line in text.splitlines() if line.startswith(begin) and "arXiv" not in line]
        assert f"{row['perplexity']:.3f}" in line


def test_a_method_that_may_be_as_good_is_named(committed: dict[str, Any]) -> None:
    rows = [dict(row) for row in committed["rows"]]
    row = next(row for row in rows if row["method"] == "FLAP")
    row["more"] = [-0.1, 0.2]
    assert f"FLAP at {row['size']}." in page.verdict({"rows": rows})
