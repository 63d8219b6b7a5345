"""`--method grasp` with gradients: what they are, and that they find better directions than size does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.errors import UnsupportedOpError
from onnxgrail.graph.cuts.residual import layers
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.trace.facts import constants
from onnxgrail.torchgraph.ops import OPS
from onnxgrail.torchgraph.slope import Data, Loss, slopes
from tests.e2e.test_llama import perplexity
from tests.tiny import feed, mlp, tiny

LLAMA, VIT = models.load("char_llama"), models.load("digits_vit")


def run(model: ir.Model, fed: dict[str, Any]) -> Any:
    with open_session(to_bytes(model)) as session:
        return session.run(fed)["y"]


def log_softmax(y: Any) -> Any:
    y = y - y.max(axis=-1, keepdims=True)
    return y - np.log(np.exp(y).sum(axis=-1, keepdims=True))


def divergence(y: Any, dense: Any) -> float:
    ours, theirs = log_softmax(y), log_softmax(dense)
    return float((np.exp(theirs) * (theirs - ours)).sum(axis=-1).mean())


def replaced(folder: Path, **choices: Any) -> tuple[float, dict[str, Any]]:
    """Perplexity of the embedded language model with some layers replaced, and the report's entry."""
    target = folder / "slim.onnx"
    common = {"method": "grasp", "grasp_layers": 2, "check": False, "force": True}
    result = onnxgrail.compress(LLAMA.model, target, data=LLAMA.calibration, **{**common, **choices})
    return perplexity(target), dict(result.report.data["methods"]["grasp"])


def without(names: list[str], folder: Path) -> float:
    """Perplexity of the language model without some of its layers."""
    model = load(str(LLAMA.model))
    with np.load(LLAMA.calibration) as file:
        facts = observe(model, {"input_ids": file["input_ids"][:2]}, providers=("CPUExecutionProvider",))
    for name in names:
        (layer,) = [x for x in layers(model, facts.shapes, constants(model)) if x.name == name]
        values = {v.name: v for node in model.graph for v in (*node.inputs, *node.outputs) if v is not None}
        for use in list(values[layer.end].uses()):
            use.node.replace_input_with(use.idx, values[layer.begin])
    save(model, folder / "dropped.onnx")
    return perplexity(folder / "dropped.onnx")


def test_two_layers_at_a_tenth_of_their_parameters(tmp_path: Path) -> None:
    """Replacing the layers beats dropping them, and attribution beats the size of singular values."""
    dense = perplexity(LLAMA.model)
    attribution, entry = replaced(tmp_path)
    magnitude, same = replaced(tmp_path, grasp_rank="magnitude")
    names = [e["name"] for e in entry["layers"] if e["replaced"]]
    assert len(names) == 2
    assert names == [e["name"] for e in same["layers"] if e["replaced"]]
    assert "next token of input_ids" in entry["loss"]["what"]
    dropped = without(names, tmp_path)
    assert dense < attribution < 0.95 * magnitude
    assert attribution < 0.85 * dropped
    best, _ = replaced(tmp_path, grasp_whiten=True, grasp_refit=True)
    assert best < 0.85 * attribution


@pytest.mark.parametrize("layer", [1, 2])
def test_one_layer_at_a_tenth_of_its_parameters(layer: int, tmp_path: Path) -> None:
    name = f"llama.model.layers.{layer}"
    attribution, _ = replaced(tmp_path, grasp_layers=name)
    magnitude, _ = replaced(tmp_path, grasp_layers=name, grasp_rank="magnitude")
    assert attribution < magnitude
    assert attribution < without([name], tmp_path)


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (Loss(share=0.5, others=("y",)), lambda y, dense: np.square(y - dense).mean() / np.square(dense).mean()),
        (Loss(share=0.5, rows=("y",)), divergence),
        (Loss(share=1.0, rows=("y",)), lambda y, _: -log_softmax(y)[np.arange(len(y)), y.argmax(-1)].mean()),
    ],
)
def test_gradients_are_those_of_the_loss(loss: Loss, wanted: Any) -> None:
    """By finite differences; a second batch doubles them."""
    model = mlp(2, 8)
    fed = feed(model, N=6)
    dense = run(model, fed)
    found = slopes(model, ["a1"], Data([lambda: fed] * 2, [None] * 2), loss, expected={"y": dense}, tick=lambda: None)
    value = model.graph.initializers["a1"]
    weight = value.const_value.numpy().astype(np.float32)
    direction = np.random.default_rng(0).normal(size=weight.shape).astype(np.float32)

    def at(step: float) -> float:
        value.const_value = ir.tensor((loss.share * weight + step * direction).astype(np.float32))
        return float(wanted(run(model, fed).astype(np.float64), dense.astype(np.float64)))

    slope = (at(1e-2) - at(-1e-2)) / 2e-2
    assert found.loss == pytest.approx(at(0.0), rel=1e-4)
    assert np.vdot(found.gradients["a1"], direction) == pytest.approx(2 * slope, rel=2e-2, abs=1e-4)


def test_next_tokens_leave_out_padding() -> None:
    text = "e = Gather(t, ids)\ny = MatMul(e, w)"
    model = tiny("int64[N,S] ids => float[N,S,7] y", text, {"t": (7, 4), "w": (4, 7)})
    fed = feed(model)
    y = run(model, fed)
    mask = np.ones(fed["ids"].shape, dtype=bool)
    mask[0, 2:] = False
    loss = Loss(ids="ids", rows=("y",))
    found = slopes(model, ["w"], Data([lambda: fed], [mask]), loss, expected={"y": y}, tick=lambda: None)
    pairs = [(b, s) for b in range(3) for s in range(4) if mask[b, s + 1]]
    wanted = -np.mean([log_softmax(y.astype(np.float64))[b, s, fed["ids"][b, s + 1]] for b, s in pairs])
    assert found.loss == pytest.approx(wanted, rel=1e-5)


def test_models_without_tokens_are_held_against_themselves() -> None:
    common: dict[str, Any] = {"method": "grasp", "grasp_layers": 1, "check": False, "samples": 64}
    result = onnxgrail.compress(VIT.model, None, data=VIT.calibration, dry_run=True, **common)
    assert "from the original" in result.report.data["methods"]["grasp"]["loss"]["what"]
    taylor = onnxgrail.compress(VIT.model, None, data=VIT.calibration, dry_run=True, grasp_rank="taylor", **common)
    assert "its own highest class" in taylor.report.data["methods"]["grasp"]["loss"]["what"]


def test_an_op_without_gradient_is_named_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPS, ("", "Relu"))
    given = {"x": np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)}
    with pytest.raises(UnsupportedOpError, match=r"Relu.*--grasp-rank magnitude"):
        onnxgrail.compress(ir.to_proto(mlp(2, 8)), data=given, method="grasp", grasp_layers=1)
