"""Input compensation fitted: it brings ruined networks back, costs little, and goes where it does not help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.cli import main
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.methods.refine import ic
from tests.tiny import VOCABULARY, drawn, mlp, numbers, tiny


def accuracy(name: str, model: ir.Model) -> float:
    """On images that neither fit nor choice has seen."""
    with open_session(to_bytes(model)) as session:
        return models.score(models.load(name), lambda feed: list(session.run(feed).values()))


@pytest.mark.parametrize(
    ("name", "ratio", "gain"), [("digits_resnet", 0.5, 0.3), ("digits_vit", 0.7, 0.08)], ids=["resnet", "vit"]
)
def test_a_pool_at_the_input_gives_back_what_narrowing_took(
    name: str, ratio: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ic, "STEPS", 500)
    found = models.load(name)
    choices: dict[str, Any] = {"unit_ratio": ratio, "compensate": "grail", "check": False, "data": found.calibration}
    choices["selector"] = "wanda"
    plain = onnxgrail.compress(found.model, dry_run=True, **choices)
    result = onnxgrail.compress(found.model, dry_run=True, method="ic", **choices)
    dense, before, after = models.manifest()[name]["dense"], accuracy(name, plain.model), accuracy(name, result.model)
    assert before < dense - 0.1
    assert after > before + gain
    added = counting.parameters(result.model) - counting.parameters(plain.model)
    assert 0 < added <= 0.03 * counting.parameters(plain.model)
    (entry,) = result.report.data["refines"]
    assert (entry["kind"], entry["outcome"]["status"], entry["added"]["params"]) == ("ic", "ok", added)
    one, two = plain.report.data["model"], result.report.data["model"]
    assert two["params_after"] - one["params_after"] == added
    assert two["macs_after"] - one["macs_after"] == entry["added"]["macs"] == added  # every image meets the pool once
    onnx.checker.check_model(onnx.load_from_string(to_bytes(result.model)), full_check=True)


def decoder(rng: np.random.Generator) -> ir.Model:
    """An embedding, an MLP per token, a head."""
    text = "h = Gather(t, ids)\na = MatMul(h, w)\nb = Relu(a)\nc = MatMul(b, v)\nd = Add(c, h)\ny = MatMul(d, o)"
    weights = {"t": drawn(rng, (VOCABULARY, 8)), "w": (8, 64), "v": (64, 8), "o": (8, 12)}
    return tiny("int64[N,S] ids => float[] y", text, weights)


def narrow(model: ir.Model, data: Any, **choices: Any) -> onnxgrail.report.result.Result:
    common: dict[str, Any] = {
        "unit_ratio": 0.5,
        "round_to": 1,
        "blocks": ("mlp",),
        "check": False,
        "compensate": "none",
    }
    return onnxgrail.compress(ir.to_proto(model), data=data, **{**common, **choices})


def tokens(rng: np.random.Generator) -> dict[str, Any]:
    return {"ids": rng.integers(0, VOCABULARY, (40, 6))}


def test_language_models_are_compensated_behind_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ic, "STEPS", 200)
    rng = np.random.default_rng(0)
    result = narrow(decoder(rng), tokens(rng), method="grail,ic", ic_rank=4)
    (entry,) = result.report.data["refines"]
    assert entry["outcome"]["status"] == "ok"
    assert entry["after"] < 0.9 * entry["before"]
    assert entry["added"] == {
        "form": "token", "at": "h", "rank": 4, "params": 32, "macs": 6 * 32, "bytes": 128,
    }  # fmt: skip
    ops = [node.op_type for node in result.model.graph]
    assert ops[:5] == ["Gather", "MatMul", "Softmax", "MatMul", "Add"]


def test_a_seed_gives_the_same_pool_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ic, "STEPS", 60)
    rng = np.random.default_rng(0)
    model, data = decoder(rng), tokens(rng)
    one, two, other = (numbers(narrow(model, data, method="ic", ic_rank=2, seed=s)) for s in (3, 3, 4))
    assert one == two
    assert one != other


def test_what_does_not_help_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ic, "RATE", 1e5)
    rng = np.random.default_rng(0)
    model, data = decoder(rng), tokens(rng)
    weights_only = {"selector": "l2"}  # the batches that judge corrections do not choose channels
    result = narrow(model, data, method="ic", ic_rank=2, **weights_only)
    (entry,) = result.report.data["refines"]
    assert (entry["outcome"]["status"], entry["added"]) == ("plain", {})
    assert entry["after"] == entry["before"]
    assert numbers(result) == numbers(narrow(model, data, **weights_only))


def test_no_place_costs_the_pool_alone() -> None:
    data = {"x": np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)}
    result = narrow(mlp(1, 8), data, method="ic")
    (entry,) = result.report.data["refines"]
    assert entry["outcome"]["status"] == "skipped"
    assert "allowed" in entry["outcome"]["reason"]  # 3 % of so small a model is less than one addition


def test_the_command_line_says_what_it_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ic, "STEPS", 100)
    rng = np.random.default_rng(0)
    model, data = tmp_path / "m.onnx", tmp_path / "d.npz"
    model.write_bytes(to_bytes(decoder(rng)))
    np.savez(data, **tokens(rng))
    words = [
        "compress",
        str(model),
        "--data",
        str(data),
        "--compensate",
        "none",
        "--ratio=0.3",
        "--method",
        "ic",
        "--ic-rank",
        "2",
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "Refine ic: held-out error" in done.output
    assert re.search(r", \+\d+ parameters,", done.output)
    assert "neurons (2 of 2 blocks" in done.output  # the pool is as wide as the embedding is now
