"""The re-implementations of published methods: at full size they change nothing, and each does what its paper says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench.published import methods, page, pruning, readers, subjects, transformer
from bench.published.__main__ import METHODS, judged, nearest
from bench.published.methods import Dense, Plan
from bench.published.subjects import Subject
from bench.published.transformer import Array, Layer, Net
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file

SAMPLES = 4
LLAMA, VIT = subjects.char_llama(), subjects.digits_vit()


def few(subject: Subject) -> Dense:
    feed = {name: array[:SAMPLES] for name, array in subject.calibration.items()}
    return methods.measured(subject.net, subject.read(feed))


def encoder() -> Net:
    """A small encoder with norms after the sums, as MiniLM has them."""
    rng, channels, neurons = np.random.default_rng(0), 24, 40

    def some(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    def norm() -> Array:
        return np.stack([1 + 0.2 * some(channels), some(channels)])

    layers = [
        Layer(
            **readers.single({name: some(channels, channels) for name in "qkvo"}),
            **readers.single({"up": some(channels, neurons), "down": some(neurons, channels)}),
            pairs=readers.every(3, 8),
            **{f"bias_{name}": some(channels) for name in ("q", "o", "down")},
            bias_up=some(neurons),
            norm_o=norm(),
            norm_down=norm(),
        )
        for _ in range(3)
    ]
    table = {"embedding": some(50, channels), "start": some(16, channels), "norm": norm()}
    return Net(**table, layers=tuple(layers), others=7, epsilon=1e-12, channels=channels, head_size=8)


@cache
def dense_of(net: str) -> Dense:
    if net == "encoder":
        return methods.measured(encoder(), np.random.default_rng(1).integers(0, 50, (SAMPLES, 16)))
    return few(LLAMA if net == "char_llama" else VIT)


@pytest.fixture
def dense() -> Dense:
    return dense_of("char_llama")


POST = {"SliceGPT", "SliceGPT, one rotation"}  # cannot run where norms come after the sums
NETS = ("char_llama", "digits_vit", "encoder")
CASES = [(net, name) for net in NETS for name in METHODS if net != "encoder" or name not in POST]


@pytest.mark.parametrize("subject", [LLAMA, VIT], ids=lambda subject: subject.name)
def test_the_network_in_numpy_is_that_of_the_file(subject: Subject) -> None:
    feed = {name: array[:SAMPLES] for name, array in subject.calibration.items()}
    exact = ort.InferenceSession(subject.model).run(None, feed)[0]
    np.testing.assert_allclose(subject.network(subject.net)(feed), exact, rtol=1e-4, atol=1e-4)


def bert_file(path: Path) -> None:
    """Write a layer of an encoder as the exporter names its weights, with biases of keys and values."""
    rng, root, norms = np.random.default_rng(2), "bert.encoder.layer.0", ["bert.embeddings.LayerNorm"]
    norms += [f"{root}.attention.output.LayerNorm", f"{root}.output.LayerNorm"]
    shapes: dict[str, tuple[int, ...]] = {f"bert.embeddings.{n}_embeddings.weight": (9, 64) for n in readers.EMBEDDINGS}
    shapes |= {f"{norm}.{part}": (64,) for norm in norms for part in ("weight", "bias")}
    shapes |= {f"W_{n}": (64, 64) for n in "qkvo"} | {"W_up": (64, 80), "W_down": (80, 64)}
    places = readers.PLACES | {"k": "attention.self.key"}
    shapes |= {f"{root}.{place}.bias": (80 if n == "up" else 64,) for n, place in places.items()}
    held = {name: rng.standard_normal(shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    ints = {"zero": np.array([0]), "split": np.array([0, 0, 2, 32]), "join": np.array([0, 0, 64])}
    held |= {"scale": np.array(32**-0.5, np.float32)}
    table = "bert.embeddings.{}_embeddings.weight".format
    steps = [("Gather", f"{table('word')} input_ids", "w"), ("Gather", f"{table('token_type')} zero", "t")]
    steps += [("Add", "w t", "wt"), ("Add", f"wt {table('position')}", "e")]
    steps.append(("LayerNormalization", norm(norms, 0, "e"), "x"))
    for n, source in (("q", "x"), ("k", "x"), ("v", "x")):
        steps += [*linear(root, places, n, source), ("Reshape", f"{n} split", f"{n}s")]
        steps.append(("Transpose", f"{n}s", f"{n}t"))
    steps += [("MatMul", "qt kt", "scores"), ("Mul", "scores scale", "small"), ("Softmax", "small", "shares")]
    steps += [("MatMul", "shares vt", "mixed"), ("Transpose", "mixed", "back"), ("Reshape", "back join", "a")]
    steps += [*linear(root, places, "o", "a"), ("Add", "o x", "s1")]
    steps.append(("LayerNormalization", norm(norms, 1, "s1"), "mid"))
    steps += [*linear(root, places, "up", "mid"), ("Gelu", "up", "h"), *linear(root, places, "down", "h")]
    steps += [("Add", "down mid", "s2"), ("LayerNormalization", norm(norms, 2, "s2"), "out")]
    turns = {"kt": [0, 2, 3, 1]}
    nodes = []
    for op, inputs, output in steps:
        extra: dict[str, Any] = {"Transpose": {"perm": turns.get(output, [0, 2, 1, 3])}}.get(op, {})
        extra |= {"epsilon": 1e-12} if op == "LayerNormalization" else {}
        nodes.append(helper.make_node(op, inputs.split(), [output], **extra))
    weights = [numpy_helper.from_array(value, name) for name, value in (held | ints).items()]
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", TensorProto.INT64, ["n", 9])]
    graph = helper.make_graph(nodes, "bert", inputs, [info("out", TensorProto.FLOAT, ["n", 9, 64])], weights)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]), path)


def norm(names: list[str], at: int, source: str) -> str:
    return f"{source} {names[at]}.weight {names[at]}.bias"


def linear(root: str, places: dict[str, str], name: str, source: str) -> list[tuple[str, str, str]]:
    bias = f"{root}.{places[name]}.bias"
    return [("MatMul", f"{source} W_{name}", f"{name}_m"), ("Add", f"{name}_m {bias}", name)]


def test_an_encoder_with_norms_after_the_sums_is_read_from_its_file(tmp_path: Path) -> None:
    bert_file(tmp_path / "bert.onnx")
    net, ids = readers.bert(tmp_path / "bert.onnx"), np.random.default_rng(3).integers(0, 9, (2, 9))
    exact = ort.InferenceSession(tmp_path / "bert.onnx").run(None, {"input_ids": ids})[0]
    np.testing.assert_allclose(transformer.outputs(net, ids), exact, rtol=1e-4, atol=1e-4)
    whole = counting.parameters(model_file.load(tmp_path / "bert.onnx"))
    assert transformer.parameters(net) == whole - 2 * 64  # biases of keys and values


@pytest.mark.parametrize(("net", "name"), CASES)
def test_nothing_changes_at_full_size(net: str, name: str) -> None:
    any_dense = dense_of(net)
    layer = any_dense.net.layers[0]
    if name.startswith("SVD-LLM"):  # factors of full rank have more parameters than the matrix
        ranks = {name: min(getattr(layer, name)[0].shape) for name in layer.matrices}
        made = methods.factored(any_dense, ranks, update=name.endswith("update"))
    else:
        first, *_ = METHODS[name](any_dense).values()
        made = max(first, key=lambda plan: plan.params).make()
    whole, same = (transformer.outputs(x, any_dense.inputs) for x in (any_dense.net, made))
    np.testing.assert_allclose(same, whole, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("net", "name"), CASES)
def test_arrays_have_the_parameters_of_the_plan(net: str, name: str) -> None:
    dense = dense_of(net)
    target = transformer.parameters(dense.net) * (3 if net == "encoder" else 2) // 4
    options = METHODS[name](dense).values()
    reached = [min((p for p in plans if p.params >= target), key=lambda plan: plan.params) for plans in options]
    for plan in reached[:1] + reached[1:][-1:]:
        made = plan.make()
        assert transformer.parameters(made) == plan.params
        assert np.isfinite(transformer.outputs(made, dense.inputs[:2])).all()
        assert net == "encoder" or plan.params <= 1.04 * target


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
    whole = transformer.widened(dense.net, embedding=dense.net.embedding @ P, layers=tuple(layers))
    one, other = (transformer.outputs(x, dense.inputs) for x in (net, whole))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-3)


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
    new = pruning.picked(layer, C, dense.means[0]["z"], keep)
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


def test_the_ridge_of_modegpt_decides_between_what_is_alone_and_what_is_loud() -> None:
    C = np.array([[1.0, 1 - 1e-6, 0.0], [1 - 1e-6, 1.0, 0.0], [0.0, 0.0, 1e-3]])
    W = np.eye(3, dtype=np.float32)
    assert pruning.nystrom(C, W, 1, 1e-4)[0].tolist() == [2]
    assert pruning.nystrom(C, W, 1, np.trace(C) / 3)[0].tolist() in ([0], [1])


def test_shares_of_layers_keep_the_total_below_the_largest_ratio() -> None:
    ratios = pruning.capped(2.4, np.array([8.0, 1.0, 1.0, 2.0]))
    assert sum(ratios) == pytest.approx(2.4)
    assert ratios[0] == pruning.MOST
    assert ratios[3] == pytest.approx(2 * ratios[1])


def test_a_row_has_its_difference_in_the_same_samples(dense: Dense) -> None:
    plans = {"": [Plan(params=100, make=lambda: dense.net)]}
    others = np.column_stack([np.full(64, 128.0), np.full(64, 128.0)])
    with pytest.raises(AssertionError, match="not those of the plan"):
        judged(LLAMA, plans, 100, others)
    size = transformer.parameters(dense.net)
    row = judged(LLAMA, {"": [Plan(params=size, make=lambda: dense.net)]}, size, others)
    low, high = row["more"]
    assert low < row["value"] - np.e < high
    assert row["value"] == pytest.approx(3.477, abs=5e-3)


def test_the_dense_network_is_no_distance_from_itself() -> None:
    losses = VIT.judged(VIT.network(VIT.net))
    assert losses.shape == (400, 2)
    assert VIT.value(losses.sum(axis=0)) == 0.0


def test_the_bias_of_queries_counts_in_the_energies_of_modegpt() -> None:
    dense = dense_of("encoder")
    layer = dense.net.layers[1]
    *_, (_, values) = list(transformer.steps(dense.net, dense.inputs))[:2]
    q, k = (methods.flat(transformer.product(values["z"], m, b)) for m, b in ((layer.q, layer.bias_q), (layer.k, None)))
    scores = (np.linalg.norm(q, axis=0) * np.linalg.norm(k, axis=0)).reshape(3, 8)
    new = pruning.picked(layer, dense.moments[1]["z"], dense.means[1]["z"], 3)
    np.testing.assert_array_equal(new.pairs, np.sort(np.argsort(-scores, axis=1)[:, :3], axis=1))


def test_neurons_that_the_surgeon_removes_together_leave_the_same_fit(dense: Dense) -> None:
    W, H = dense.net.layers[2].down[0], dense.moments[2]["h"]
    one, _ = pruning.eliminated(W, H, len(W), len(W) // 2)
    kept, new = pruning.eliminated(W, H, len(W), len(W) // 2, together=16)
    assert len(kept) == len(one)
    G, gone = methods.damped(H, 0.01), np.setdiff1d(np.arange(len(W)), kept)
    wanted = W[kept] + np.linalg.solve(G[np.ix_(kept, kept)], G[np.ix_(kept, gone)] @ W[gone])
    np.testing.assert_allclose(new[kept], wanted, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    return data


@pytest.mark.parametrize("subject", [LLAMA, VIT], ids=lambda subject: subject.name)
def test_the_results_are_of_the_embedded_models(committed: dict[str, Any], subject: Subject) -> None:
    data = committed[subject.name]
    assert data["params"] == counting.parameters(model_file.load(subject.model))
    assert {row["size"] for row in data["rows"]} == set(subject.sizes)
    assert {row["method"] for row in data["rows"]} == {page.OURS, *subject.alone, *METHODS}


@pytest.mark.parametrize("name", ["char_llama", "digits_vit", "minilm"])
def test_the_results_are_at_equal_parameters(committed: dict[str, Any], name: str) -> None:
    data = committed[name]
    sizes = {row["size"]: row["params"] for row in data["rows"] if row["method"] == page.OURS}
    rows = {(row["method"], row["size"]): row for row in data["rows"]}
    names = {row["method"] for row in data["rows"]}
    assert names | set(data["without"]) >= set(METHODS)
    assert set(rows) == {(method, size) for method in names for size in sizes}
    most = {"char_llama": 1.02, "digits_vit": 1.06, "minilm": 1.01}[name]
    for (method, size), row in rows.items():
        least = 1.0 if method in METHODS or method == page.OURS else 0.95
        assert least * sizes[size] <= row["params"] <= most * sizes[size]


def test_the_section_is_that_of_the_results(committed: dict[str, Any]) -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "fidelity.md").read_text(encoding="utf-8")
    assert page.table(committed) in text, "run `python -m bench.fidelity --page-only`"
    for name, data in committed.items():
        lines = text.split(f"| {name} | {data['rows'][0]['size']} of")[1].split("\n\n")[0].splitlines()
        for row in data["rows"]:
            (line,) = [line for line in lines if line.startswith(f"| {row['method']} | ")]
            assert page.number(row["value"]) in line


def test_a_method_that_may_be_as_good_is_named(committed: dict[str, Any]) -> None:
    rows = [dict(row) for row in committed["char_llama"]["rows"]]
    row = next(row for row in rows if row["method"] == "FLAP")
    row["more"] = [-0.1, 0.2]
    assert f"FLAP at {row['size']}." in page.verdict({"rows": rows})
    row["more"] = [-0.2, -0.1]
    assert f"Better than the default: FLAP at {row['size']}." in page.verdict({"rows": rows})


def test_a_method_that_cannot_run_has_a_row_and_a_reason(committed: dict[str, Any]) -> None:
    text = page.table({"minilm": committed["minilm"]})
    assert "| SliceGPT | cannot run |" in text
    assert f"SliceGPT and SliceGPT, one rotation cannot run: {subjects.POSTNORM}." in text
