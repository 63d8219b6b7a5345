"""`onnxgrail refine`: models made smaller elsewhere, fitted to the one they were made from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.cli import main
from onnxgrail.errors import MissingExtraError, ModelError, OutputError, UsageError
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.methods.refine import distill, laco, tuned_norms
from onnxgrail.methods.refine.steps import aliases
from onnxgrail.torchgraph import fit
from tests.tiny import mlp, numbers, tiny

DEPTH = 3


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than users get."""
    monkeypatch.setattr(laco, "EPOCHS", 6)
    monkeypatch.setattr(laco, "STEPS", 60)
    monkeypatch.setattr(distill, "STEPS", 80)
    monkeypatch.setattr(tuned_norms, "STEPS", 80)


def data(rows: int = 96, seed: int = 1) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(rows, 5)).astype(np.float32)}


def pruned(dense: ir.Model, *, renamed: bool = False) -> ir.Model:
    """Every hidden width halved, as a foreign tool would: the first units stay; maybe all names are others."""
    small = copy(dense)
    held = small.graph.initializers
    for name in list(held):
        array = held[name].const_value.numpy()
        if name[0] in "abc":
            held[name].const_value = ir.tensor(
                array[: len(array) // 2] if name[0] in "bc" else array[:, : array.shape[1] // 2]
            )
            held[name].shape = held[name].const_value.shape
    for node in small.graph:
        for value in node.outputs:
            value.shape = None
            if renamed and not value.is_graph_output():
                value.name = f"other/{value.name}"
    return small


def error(dense: ir.Model, small: ir.Model) -> float:
    """Squared error on fresh data, as a share."""
    given = data(seed=7)
    with open_session(to_bytes(dense)) as a, open_session(to_bytes(small)) as b:
        wanted, got = (s.run(given)["y"].astype(np.float64) for s in (a, b))
    return float(np.square(got - wanted).sum() / np.square(wanted).sum())


def fitted(dense: ir.Model, small: ir.Model, **choices: Any) -> onnxgrail.report.result.Result:
    given = {"reference": ir.to_proto(dense), "data": data(), "check": False, **choices}
    return onnxgrail.refine_model(ir.to_proto(small), **given)


@pytest.mark.parametrize("refine", ["laco", "distill"])
def test_a_model_fitted_to_itself_stays_as_it_is(refine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.tensor(-1e-9)  # what rounding leaves of the divergence of equal distributions
    monkeypatch.setattr(fit._Fitted, "_loss", lambda *_: loss)
    dense = mlp(1, 16)
    found = fitted(dense, dense, refine=refine)
    assert numbers(found) == numbers(onnxgrail.compress(dense, ratio=0, data=data(), check=False))
    assert {e["outcome"]["status"] for e in found.report.data["refines"]} <= {"plain", "skipped"}


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("refine", ["laco", "distill"])
def test_a_foreign_model_comes_closer(refine: str, renamed: bool) -> None:
    dense = mlp(DEPTH, 16)
    small = pruned(dense, renamed=renamed)
    result = fitted(dense, small, refine=refine)
    assert error(dense, result.model) < 0.7 * error(dense, small)
    entries = result.report.data["refines"]
    assert (entries[-1]["block"], entries[-1]["outcome"]["status"]) == ("model", "ok")
    if refine == "laco":
        blocks = entries[:-1]
        assert len(blocks) > DEPTH
        assert sum(e["outcome"]["status"] == "ok" for e in blocks) >= DEPTH
        assert all(e["after"] < e["before"] for e in blocks if e["outcome"]["status"] == "ok")


def test_blocks_are_matched_by_name_else_in_order() -> None:
    dense = mlp(DEPTH, 16)
    facts = observe(dense, data(2))
    here, there = pruned(dense), pruned(dense, renamed=True)
    assert aliases(dense, facts, here, observe(here, data(2))) == {}  # names are enough
    pairs = aliases(dense, facts, there, observe(there, data(2)))
    assert len(pairs) >= DEPTH
    assert all(mine == f"other/{name}" for name, mine in pairs.items())
    other = mlp(DEPTH - 1, 8)
    for node in other.graph:
        for value in node.outputs:
            value.name = value.name if value.is_graph_output() else f"other/{value.name}"
    assert aliases(dense, facts, other, observe(other, data(2))) == {}  # no telling them apart


def test_models_of_other_depth_are_fitted_as_a_whole() -> None:
    dense, small = mlp(2, 16), mlp(1, 16)
    for node in small.graph:
        for value in node.outputs:
            value.name = value.name if value.is_graph_output() else f"other/{value.name}"
    result = fitted(dense, small, refine="laco")
    assert len(result.report.data["refines"]) == 2  # one block, and the whole
    assert error(dense, result.model) < error(dense, small)


def test_the_report_has_both_sides(tmp_path: Path) -> None:
    dense, small = mlp(DEPTH, 16), pruned(mlp(DEPTH, 16))
    paths = tmp_path / "small.onnx", tmp_path / "dense.onnx"
    for path, model in zip(paths, (small, dense), strict=True):
        path.write_bytes(to_bytes(model))
    np.savez(tmp_path / "d.npz", **data())
    words = ["refine", str(paths[0]), "--reference", str(paths[1]), "--data", str(tmp_path / "d.npz")]
    done = CliRunner().invoke(main, [*words, "--report", str(tmp_path / "r.json"), "--refine", "distill"])
    assert done.exit_code == 0, done.output
    assert "Refine distill: held-out error" in done.output
    found = json.loads((tmp_path / "r.json").read_text())
    (before,), (after,) = found["reference"]["outputs_before"], found["verification"]["outputs"]
    assert after["nmse"] < before["nmse"]
    assert found["model"]["params_before"] == found["model"]["params_after"] < found["reference"]["params"]
    assert found["model"]["bytes_after"] == (tmp_path / "small.refined.onnx").stat().st_size
    assert found["timing"].keys() >= {"load", "refine", "verify", "write"}
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 1
    assert "exists" in again.output
    gate = CliRunner().invoke(main, [*words, "--force", "--min-cosine", "1", "--refine", "norms"])
    assert gate.exit_code == 3


@pytest.mark.parametrize("asked", ["20", "h.npz"])
def test_held_out_samples_judge(asked: str, tmp_path: Path) -> None:
    """Held-out samples are not learnt from, and gates judge by them."""
    dense, small = mlp(DEPTH, 16), pruned(mlp(DEPTH, 16))
    (tmp_path / "small.onnx").write_bytes(to_bytes(small))
    (tmp_path / "dense.onnx").write_bytes(to_bytes(dense))
    np.savez(tmp_path / "d.npz", **data())
    np.savez(tmp_path / "h.npz", **data(seed=7))
    words = ["refine", "small.onnx", "--reference", "dense.onnx", "--data", "d.npz", "--refine", "distill"]
    words = [str(tmp_path / word) if "." in word else word for word in words]
    held = asked if asked.isdecimal() else str(tmp_path / asked)
    more = ["--held-out", held, "--report", str(tmp_path / "r.json")]
    done = CliRunner().invoke(main, [*words, *more])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "r.json").read_text())
    count, left = (20, 76) if asked.isdecimal() else (96, 96)
    judged = found["verification"]["held_out"]
    assert (judged["asked"], judged["samples"], found["calibration"]["samples"]) == (held, count, left)
    assert judged["outputs"][0]["nmse"] < found["reference"]["held_out_before"][0]["nmse"]
    assert f"on {count} held-out samples" in done.output
    assert "to the reference" in done.output
    cosine = judged["outputs"][0]["cosine"]
    for limit, code in ((cosine - 1e-3, 0), (cosine + 1e-3, 3)):
        assert (
            CliRunner().invoke(main, [*words, *more, "--force", "--dry-run", "--min-cosine", str(limit)]).exit_code
            == code
        )
    if not asked.isdecimal():
        assert judged["outputs"][0]["nmse"] == pytest.approx(
            error(dense, ir.load(tmp_path / "small.refined.onnx")), 0.1
        )


def test_how_data_are_read_is_a_choice_here_too(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "images").mkdir()
    for number, image in enumerate(np.random.default_rng(0).integers(0, 256, (16, 4, 4), np.uint8)):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
    wide, none = ({"w": np.full((16, 4), number, np.float32)} for number in (1, 0))
    one, other = (tiny("float[N,1,4,4] x => float[N,4] y", "f = Flatten(x)\ny = MatMul(f, w)", w) for w in (wide, none))
    given = {"data": str(tmp_path / "images"), "check": True, "refine": "norms"}  # there are none: nothing moves
    apart = [
        fitted(one, other, image_std=std, **given).report.data["verification"]["outputs"][0]["max_abs"]
        for std in (None, 0.1)
    ]
    assert apart[1] == pytest.approx(10 * apart[0])
    with pytest.raises(UsageError, match="--tokenizer does nothing"):
        fitted(one, other, tokenizer="t.json", **given)


def test_neither_model_is_replaced(tmp_path: Path) -> None:
    dense = tmp_path / "dense.onnx"
    dense.write_bytes(to_bytes(mlp(1, 8)))
    small = tmp_path / "small.onnx"
    small.write_bytes(to_bytes(pruned(mlp(1, 8))))
    for target, what in ((dense, "the reference"), (small, "the input")):
        with pytest.raises(OutputError, match=f"is {what}"):
            onnxgrail.refine_model(small, target, reference=dense, data=data(), force=True)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, ["refine", str(tmp_path / "s.onnx"), "--reference", str(tmp_path / "m.onnx")])
    assert done.exit_code == 2
    assert "without torchrun" in done.output


def test_other_inputs_are_refused() -> None:
    other = tiny("float[N,5] z => float[N,4] y", "y = MatMul(z, w)", {"w": (5, 4)})
    with pytest.raises(ModelError, match=r"the small model takes z .* expected x"):
        fitted(mlp(1, 8), other)


def test_other_outputs_are_refused() -> None:
    other = tiny("float[N,5] x => float[N,4] logits", "logits = MatMul(x, w)", {"w": (5, 4)})
    with pytest.raises(ModelError, match=r"has the outputs logits, and the reference y.*rename"):
        fitted(mlp(1, 8), other)


def test_outputs_of_another_shape_are_refused() -> None:
    other = tiny("float[N,5] x => float[N,3] y", "y = MatMul(x, w)", {"w": (5, 3)})
    with pytest.raises(ModelError, match=r"output 'y' of the small model has the shape \[2, 3\].*\[2, 4\]"):
        fitted(mlp(1, 8), other)


@pytest.mark.parametrize("choice", [{"ratio": 0.5}, {"refine": ()}, {"refine": "lacoo"}])
def test_choices_without_a_meaning_are_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        fitted(mlp(1, 8), mlp(1, 8), **choice)


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    with pytest.raises(MissingExtraError, match="torch"):
        fitted(mlp(1, 8), mlp(1, 8))


def normed() -> ir.Model:
    """Two layers after normalizations, one of them written out, and one constant that no normalisation owns."""
    text = """
        n = LayerNormalization (x, g, h)
        a = MatMul(n, w)
        b = Relu(a)
        c = MatMul(b, v)
        d = Add(c, x)
        m = ReduceMean <axes = [-1]> (d)
        e = Sub(d, m)
        q = Mul(e, e)
        s = ReduceMean <axes = [-1]> (q)
        t = Add(s, tiny)
        r = Sqrt(t)
        u = Div(e, r)
        p = Mul(u, g2)
        k = Add(p, h2)
        f = MatMul(k, o)
        y = Mul(f, own)
    """
    vector = np.ones(5, np.float32)
    weights = {
        "g": vector, "h": 0 * vector, "g2": vector, "h2": 0 * vector, "w": (5, 16), "v": (16, 5), "o": (5, 4),
        "own": np.ones(4, np.float32), "tiny": np.float32(1e-5),
    }  # fmt: skip
    return tiny("float[N,5] x => float[N,4] y", text, weights, opset=17)


def test_norms_alone_move() -> None:
    dense = normed()
    given = {"unit_ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "compensate": "none", "check": False, "data": data()}
    before, after = (onnxgrail.compress(ir.to_proto(dense), **given, refine=kind).model for kind in ("none", "norms"))
    arrays = [{n: v.const_value.numpy() for n, v in m.graph.initializers.items()} for m in (before, after)]
    moved = {n for n, array in arrays[0].items() if not np.array_equal(array, arrays[1][n])}
    assert moved == {"g", "h", "g2", "h2"}
    assert error(dense, after) < error(dense, before)


def test_without_normalisations_norms_are_skipped() -> None:
    entries = fitted(mlp(1, 8), pruned(mlp(1, 8)), refine="norms").report.data["refines"]
    assert [(e["kind"], e["outcome"]["status"], e["outcome"]["reason"]) for e in entries] == [
        ("norms", "skipped", tuned_norms.NONE)
    ]


def test_blocks_with_unknown_channels_are_fitted_together() -> None:
    dense = mlp(DEPTH, 16)
    choices: dict[str, Any] = {"unit_ratio": 0.3, "round_to": 1, "compensate": "none", "check": False, "data": data()}
    small = onnxgrail.compress(ir.to_proto(dense), blocks=("mlp", "stream"), **choices).model
    result = fitted(dense, small, refine="laco")
    block, whole = result.report.data["refines"]
    assert (block["outcome"]["status"], whole["outcome"]["status"]) == ("ok", "ok")
    assert error(dense, result.model) < 0.7 * error(dense, small)
