"""Networks on graphs: every feed has other numbers of nodes and edges, and edges name nodes by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail.calibration.feeds.signature import samples_of, signature_of
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Array
from onnxgrail.graph.io.model_file import save
from tests.tiny import tiny

SIGNATURE = "int64[V] kinds, int64[2,E] edges, float[E,1] lengths => float[V,8] y"
BODY = """
    e = Gather(table, kinds)
    a0 = MatMul(e, w0)
    a1 = Relu(a0)
    u = MatMul(a1, w1)
    source = Gather(edges, zero)
    target = Gather(edges, one)
    m = Gather(u, source)
    far = Mul(m, lengths)
    m0 = MatMul(far, w2)
    m1 = Relu(m0)
    m2 = MatMul(m1, w3)
    blank = Mul(u, nothing)
    rows = Unsqueeze(target, last)
    s = ScatterND<reduction = "add">(blank, rows, m2)
    y = Add(u, s)
"""
WEIGHTS: dict[str, Any] = {
    "table": (5, 8), "w0": (8, 24), "w1": (24, 8), "w2": (8, 24), "w3": (24, 8), "zero": np.array(0),
    "one": np.array(1), "last": np.array([1]), "nothing": np.zeros(1, np.float32),
}  # fmt: skip


def graph(nodes: int, seed: int) -> dict[str, Array]:
    """A ring of nodes with some more edges."""
    rng = np.random.default_rng(seed)
    ring = np.stack([np.arange(nodes), np.roll(np.arange(nodes), 1)])
    edges = np.concatenate([ring, rng.integers(0, nodes, (2, nodes))], axis=1)
    lengths = rng.uniform(0.5, 1.5, (edges.shape[1], 1)).astype(np.float32)
    return {"kinds": rng.integers(0, 5, nodes), "edges": edges, "lengths": lengths}


GRAPHS = [graph(6 + seed % 5, seed) for seed in range(24)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tiny(SIGNATURE, BODY, WEIGHTS), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_sizes_that_no_part_of_a_feed_can_have_are_seen_in_another_feed(path: Path) -> None:
    model = ir.load(path)
    alone = observe(model, GRAPHS[0])
    beside = observe(model, GRAPHS[0], others=[lambda n=n: GRAPHS[n] for n in range(len(GRAPHS))])
    assert "kinds" not in alone.varying  # a node less: an edge would have no end
    assert beside.varying["kinds"] == {0}
    assert beside.varying["target"] == {0}
    assert beside.varying["u"] == {0}


@pytest.mark.parametrize("choices", [{}, {"quantize": "int4"}, {"compensate": "grail"}], ids=str)
def test_graphs_of_all_sizes_calibrate_and_run(path: Path, choices: dict[str, Any]) -> None:
    out = path.with_name("o.onnx")
    report = onnxgrail.compress(path, out, data=GRAPHS, unit_ratio=0.5, **choices).report.data
    assert [b["kept"] for b in report["blocks"]] == [4, 12, 12]
    one, other = (ort.InferenceSession(p, providers=["CPUExecutionProvider"]) for p in (path, out))
    for feed in (graph(3, 50), graph(30, 51)):
        assert one.run(None, feed)[0].shape == other.run(None, feed)[0].shape


def test_a_loss_is_found_on_graphs_of_all_sizes(path: Path) -> None:
    out = path.with_name("o.onnx")
    report = onnxgrail.compress(path, out, data=GRAPHS, max_loss=0.2, minimize="params").report.data
    search = report["allocation"]["search"]
    assert search["tried"][search["chosen"]]["loss"]["bound"] <= 0.2


DENSE = """
    a = MatMul(x, w0)
    b = MatMul(near, a)
    c = Relu(b)
    d = MatMul(c, w1)
    y = MatMul(near, d)
"""


def dense(nodes: int, seed: int) -> dict[str, Array]:
    """A graph as a matrix of nodes by nodes."""
    rng = np.random.default_rng(seed)
    near = (rng.random((nodes, nodes)) < 0.3) | np.eye(nodes, dtype=bool)
    return {
        "x": rng.normal(size=(nodes, 6)).astype(np.float32),
        "near": (near / near.sum(1, keepdims=True)).astype(np.float32),
    }


@pytest.mark.parametrize("choices", [{"unit_ratio": 0.5}, {"max_loss": 0.2, "minimize": "params"}], ids=str)
def test_rows_of_a_matrix_of_nodes_by_nodes_are_no_samples(tmp_path: Path, choices: dict[str, Any]) -> None:
    path, out = tmp_path / "m.onnx", tmp_path / "o.onnx"
    save(tiny("float[V,6] x, float[V,V] near => float[V,4] y", DENSE, {"w0": (6, 32), "w1": (32, 4)}), path)
    folder = tmp_path / "data"
    folder.mkdir()
    for n in range(20):
        np.savez(folder / f"{n}.npz", **dense(9 + n, n))  # type: ignore[arg-type]
    report = onnxgrail.compress(path, out, data=folder, **choices).report.data
    assert report["blocks"][0]["kept"] < 32
    assert ort.InferenceSession(out, providers=["CPUExecutionProvider"]).run(None, dense(5, 50))[0].shape == (5, 4)
    single = onnxgrail.compress(path, out, data=dense(40, 1), unit_ratio=0.5, force=True).report.data
    assert single["calibration"]["samples"] == 1


def test_open_axes_that_an_exporter_names_alike_count_samples() -> None:
    model = tiny("float[None,None] x => float[None,4] y", "y = MatMul(x, w)", {"w": (6, 4)}, recorded=False)
    assert samples_of({"x": np.zeros((6, 6))}, signature_of(model)) == 6
    named = tiny("float[n,n] x => float[n,4] y", "y = MatMul(x, w)", {"w": (6, 4)}, recorded=False)
    assert samples_of({"x": np.zeros((6, 6))}, signature_of(named)) == 1
    assert samples_of({"x": np.zeros((3, 6))}, signature_of(named)) == 3
