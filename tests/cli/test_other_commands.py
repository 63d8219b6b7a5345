"""The commands beside `compress`: inspect, compare and demo."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import Refusal
from onnxgrail.report.report import Inspection
from tests.cli.standin import REFUSAL
from tests.command import run, said
from tests.e2e import nets
from tests.tiny import tiny

WAYS = ("none", "grail", "best")


def test_inspect(tmp_path):
    onnx.save(nets.convnet(), tmp_path / "m.onnx")
    result = run("inspect", tmp_path / "m.onnx")
    assert (result.exit_code, said(result.stderr)) == (0, "")
    data = json.loads(run("inspect", tmp_path / "m.onnx", "--json").stdout)
    assert [(b["kind"], b["units"]) for b in data["blocks"]] == [("conv", 16), ("stream", 8), ("conv", 12)]
    for text in (data["blocks"][0]["name"], "1/1", "at --ratio 0.25", "held by all blocks"):
        assert text in result.stdout
    assert all(refusal["reason"] in result.stdout for refusal in data["refusals"])
    assert "read by b" not in result.stdout
    assert "read by b" in run("inspect", tmp_path / "m.onnx", "--verbose").stdout


def test_refusals_are_grouped_with_examples(monkeypatch):
    """Refusals made up, as many as it takes."""
    refusals = tuple(Refusal(**{**REFUSAL, "node": f"n{k}"}) for k in range(5))
    last = Refusal(value="w", node="", op="", reason="only one unit")
    found = Inspection(path="m", params=1, macs=None, bytes=4, blocks=(), refusals=(last, *refusals))
    monkeypatch.setattr(onnxgrail, "inspect", lambda model, **given: found, raising=False)
    lines = [line.strip() for line in run("inspect", "m.onnx").stdout.splitlines()]
    assert lines[lines.index("Channels left alone:") + 1 :] == [
        *("5 x no rule for Foo-1", "Foo n0", "Foo n1", "Foo n2", "and 2 more (--verbose)"),
        *("1 x only one unit", "w"),
    ]
    assert "no block can be narrowed" in lines[0]
    assert "Foo n4" in run("inspect", "m.onnx", "--verbose").stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (812, "812"), (49_152, "49.2 k"), (222_000, "222 k"), (999_900, "1.00 M"), (2e9, "2.00 G")],
)
def test_short_numbers(value, text):
    from onnxgrail.cli.parts import render as _render

    assert _render.short(value) == text


@pytest.fixture
def pair(tmp_path):
    """Two real models, the second half the first, and data for them."""
    for name, scale in (("a", 1.0), ("b", 0.5)):
        text = f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[N, 3] x) => (float[N, 3] y) <float[1] s = {{{scale}}}> {{ y = Mul(x, s) }}"""
        onnx.save(onnx.parser.parse_model(text), tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((11, 3), np.float32))
    return tmp_path


def test_compare(pair):
    result = run("compare", pair / "a.onnx", pair / "b.onnx", "--data", pair / "d.npz", "--min-cosine", "0.9")
    assert result.exit_code == 0, result.output
    assert "2.500e-01" in result.stdout
    assert "MACs" in result.stdout
    failed = run("compare", pair / "a.onnx", pair / "b.onnx", "--data", pair / "d.npz", "--max-nmse", "0.1", "--json")
    assert failed.exit_code == 3
    assert said(failed.stderr) == "Error: gate failed: nmse 0.25 of output 'y' is above --max-nmse 0.1\n"
    assert json.loads(failed.stdout)["gates"][0]["passed"] is False
    near = run("compare", pair / "a.onnx", pair / "b.onnx", "--data", pair / "d.npz", "--max-nmse", "0.2499999")
    assert said(near.stderr).endswith("nmse 0.25 of output 'y' is above --max-nmse 0.2499999\n")
    drawn = run("compare", pair / "a.onnx", pair / "b.onnx", "-q")
    assert (drawn.exit_code, drawn.output) == (0, "")


def test_compare_misuse(pair):
    (pair / "t.onnx").write_text("text")
    for words in (["a.onnx", "t.onnx"], ["a.onnx", "absent.onnx"], ["a.onnx", "b.onnx", "--data", "absent.npz"]):
        result = run("compare", *(pair / w if "." in w and not w.startswith("-") else w for w in words))
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1


def test_demo(monkeypatch, tmp_path):
    """On a small model in place of the embedded ones."""
    from onnxgrail import models

    assert "no embedded model is called 'foo'" in run("demo", "--model", "foo").stderr
    folder = tmp_path / "embedded"
    folder.mkdir()
    onnx.save(nets.mlp(), folder / "m.onnx")
    np.savez(folder / "c.npz", **nets.vectors())
    held = nets.vectors(seed=9)
    labels = nets.run_mlp(nets.weights_of(nets.mlp()), held)["y"].argmax(axis=-1)  # the dense model is always right
    np.savez(folder / "h.npz", **held, labels=labels)
    place = {"model": folder / "m.onnx", "calibration": folder / "c.npz", "heldout": folder / "h.npz"}
    monkeypatch.setattr(models, "names", lambda: ("tiny",))
    monkeypatch.setattr(models, "load", lambda name: models.Embedded(name=name, metric="accuracy", **place))
    result = run("demo", "--out", tmp_path / "kept", "--ratio", "0.5")
    assert result.exit_code == 0, result.output
    words = [line.split()[:2] for line in result.stdout.splitlines() if line.strip()]
    assert [w for w in words if w[0] in ("dense", "0.5")] == [["dense", "100.00"], *(["0.5", w] for w in WAYS)]
    assert {p.name for p in (tmp_path / "kept").glob("*.onnx")} == {f"tiny.0.5.{w}.onnx" for w in WAYS}
    rows = json.loads(run("demo", "--json").stdout)["rows"]
    assert [(r["ratio"], r["compensate"]) for r in rows[:4]] == [(0, ""), *((0.3, w) for w in WAYS)]
    assert rows[0]["score"] == 1 > rows[2]["score"] > rows[1]["score"]
    assert len(rows) == 7
    assert run("demo", "--ratio", "0").exit_code == 2


def test_inspect_tells_the_shapes_it_tried_and_takes_data(tmp_path):
    model = nets.mlp()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"  # only twelve will do
    onnx.save(model, tmp_path / "m.onnx")
    told = run("inspect", tmp_path / "m.onnx")
    assert told.exit_code == 1
    assert "give --data or --input-shapes if the model needs others; these are --input-shapes x:2," in told.stderr
    assert ". Tried: x[" in told.stderr
    np.savez(tmp_path / "d.npz", **nets.vectors())
    assert run("inspect", tmp_path / "m.onnx", "--data", tmp_path / "d.npz").exit_code == 0


def test_a_model_with_a_fixed_batch_is_given_one_batch_at_least(tmp_path):
    model = nets.mlp()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 6
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **{name: array[:12] for name, array in nets.vectors().items()})
    assert run("inspect", tmp_path / "m.onnx", "--data", tmp_path / "d.npz").exit_code == 0
    told = run("compress", tmp_path / "m.onnx", "--ratio=0.3", "--data", tmp_path / "d.npz", "--samples", 2)
    assert (told.exit_code, "Calibration: 6 samples" in told.stdout) == (0, True)


def test_inspect_says_why_there_is_nothing_to_narrow(tmp_path):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (y) { y = Sigmoid(x) }'
    )
    onnx.save(model, tmp_path / "m.onnx")
    text = run("inspect", tmp_path / "m.onnx").stdout
    assert "no block can be narrowed" in text
    assert "It has no channels that one constant weight makes and another reads" in text
    assert "at --ratio" not in text


def test_the_rest_of_many_outputs_is_in_the_table_of_compare(tmp_path):
    body = "\n".join(f"y{k} = MatMul(x, w{k})" for k in range(9))
    outputs = ", ".join(f"float[N,5] y{k}" for k in range(9))
    for name in ("a", "b"):
        weights = {f"w{k}": (4, 5) for k in range(9)}
        ir.save(tiny(f"float[N,4] x => {outputs}", body, weights, seed=ord(name)), tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((9, 4), np.float32))
    text = run("compare", tmp_path / "a.onnx", tmp_path / "b.onnx", "--data", tmp_path / "x.npz").stdout
    assert "more outputs are closer (see the table)" in text
    assert "--report" not in text
