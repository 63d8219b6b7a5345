"""Wanda++: gradients of regions against autograd by hand, and the selector."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Recipe
from onnxgrail.errors import MissingExtraError, UnsupportedOpError
from onnxgrail.machine.job import Job
from onnxgrail.narrowing import gradients
from onnxgrail.torchgraph.ops import OPS
from onnxgrail.torchgraph.slope import gradient_sizes
from tests.tiny import mlp, tiny, two_ends

WIDTH = 12


def data(rows: int = 96, seed: int = 1) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(rows, 5)).astype(np.float32)}


def prepared(model: ir.Model, **choices: Any) -> Prepared:
    return prepare(ir.to_proto(model), data(), Job(recipe=Recipe(**choices)), held_out=0)


def test_gradients_of_a_norm_have_a_closed_form() -> None:
    model = tiny("float[N,S,4] x => float[] y", "y = MatMul(x, w)", {"w": (4, 3)}, recorded=False)
    weight = model.graph.initializers["w"].const_value.numpy().astype(np.float64)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(1, 5, 4)).astype(np.float32) for _ in range(6)]
    masks = [None, None, None, *(np.array([[True, True, False, True, False]]) for _ in range(3))]
    expected = {"y": (xs[0] @ weight).astype(np.float32)}
    found = gradient_sizes(model, ["w"], [({"x": x}, m) for x, m in zip(xs, masks, strict=True)], expected)
    squares = []
    for x, mask in zip(xs, masks, strict=True):
        rows = (x[0] if mask is None else x[mask]).astype(np.float64)
        y = rows @ weight
        squares.append(np.square(rows.T @ y / np.linalg.norm(y)))
    np.testing.assert_allclose(found["w"], np.sqrt(np.mean(squares, 0)), rtol=1e-4)


def test_a_region_without_output_has_no_gradient() -> None:
    model = tiny("float[N,4] x => float[] y", "z = MatMul(x, w)\ny = Relu(z)", {"w": -np.ones((4, 3), np.float32)})
    x = np.ones((1, 4), np.float32)
    found = gradient_sizes(model, ["w"], [({"x": x}, None)], {"y": np.zeros((1, 3), np.float32)})
    assert not found["w"].any()


def by_hand(model: ir.Model, samples: Sequence[Any]) -> dict[str, Any]:
    """Per layer: sum over outputs of |c| times the gradient of the size of the layer's own output."""
    held = {n: torch.tensor(v.const_value.numpy(), dtype=torch.float64) for n, v in model.graph.initializers.items()}
    found: dict[str, Any] = {}
    for x in samples:
        stream = torch.tensor(x, dtype=torch.float64) @ held["stem"]
        for layer in range(2):
            hidden = torch.relu(stream @ held[f"a{layer}"] + held[f"b{layer}"])
            weight = held[f"c{layer}"].clone().requires_grad_()
            out = stream + hidden @ weight
            (slope,) = torch.autograd.grad(out.norm(), weight)
            found.setdefault(f"c{layer}", []).append(slope.square())
            stream = stream + hidden @ held[f"c{layer}"]
    return {n: (held[n].abs() * torch.stack(s).mean(0).sqrt()).sum(1).numpy() for n, s in found.items()}


def test_every_unit_gets_the_gradients_of_its_own_region() -> None:
    model = mlp(2, WIDTH)
    ready = prepared(model)
    blocks = [b for b in ready.survey.blocks if b.kind == "mlp"]
    seen: list[tuple[str, int, int]] = []
    found = gradients.regional_gradients(ready, blocks, Recipe(), lambda *event: seen.append(event))
    rows = [feed["x"][k : k + 1] for feed in ready.batches for k in range(3)]  # 32 samples from 12 batches
    want = by_hand(model, rows)
    by_weight = {b.consumers[0].initializer: found[b.name] for b in blocks}
    assert by_weight.keys() == {"c0", "c1"}
    for name, slopes in want.items():
        np.testing.assert_allclose(by_weight[name], slopes, rtol=1e-4)
    regions = seen[-1][2]
    assert seen == [("gradients", k, regions) for k in range(regions + 1)]


def test_outputs_that_are_made_on_the_way_count() -> None:
    ready = prepared(two_ends())
    blocks = [b for b in ready.survey.blocks if b.kind == "mlp"]
    assert {b.consumers[0].initializer for b in blocks} == {"v", "q"}
    found = gradients.regional_gradients(ready, blocks, Recipe(), lambda *_: None)
    assert all((slopes > 0).any() for slopes in found.values())


def kept(model: ir.Model, **choices: Any) -> dict[str, list[int]]:
    common: dict[str, Any] = {
        "unit_ratio": 0.5,
        "round_to": 1,
        "blocks": ("mlp",),
        "check": False,
        "held_out": 0,
        "compensate": "none",
    }
    report = onnxgrail.compress(ir.to_proto(model), data=data(), **{**common, **choices}).report.data
    return {b["name"]: b["kept_units"] for b in report["blocks"] if b["kind"] == "mlp"}


def test_units_that_the_region_hangs_on_stay() -> None:
    model = mlp(1, 64)
    ready = prepared(model)
    (block,) = [b for b in ready.survey.blocks if b.kind == "mlp"]
    (slopes,) = gradients.regional_gradients(ready, [block], Recipe(), lambda *_: None).values()
    held = {n: v.const_value.numpy() for n, v in model.graph.initializers.items()}
    hidden = np.maximum(data()["x"] @ held["stem"] @ held["a0"] + held["b0"], 0)
    wanda = np.sqrt(np.mean(np.square(hidden), 0)) * np.abs(held["c0"]).sum(1)
    want, plain = (np.sort(np.argsort(-scores)[:32]).tolist() for scores in (wanda + 100 * slopes, wanda))
    assert kept(model, selector="wandapp") == {block.name: want}
    assert kept(model, selector="wanda") == {block.name: plain}
    assert want != plain


def test_outputs_that_are_no_tensors_have_no_gradient() -> None:
    model = mlp(1, 8)
    split = ir.Node("", "SplitToSequence", [model.graph.outputs[0]], num_outputs=1)
    split.outputs[0].name, split.outputs[0].type = "pieces", ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    model.graph.append(split)
    model.graph.outputs.append(split.outputs[0])
    assert kept(model, selector="wandapp") == kept(mlp(1, 8), selector="wandapp")


def test_an_op_without_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPS, ("", "Relu"))
    with pytest.raises(UnsupportedOpError, match=r"no gradient through Relu.*--selector wanda"):
        kept(mlp(1, 8), selector="wandapp")


def test_without_torch_the_selector_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    with pytest.raises(MissingExtraError, match="--selector wandapp needs torch"):
        kept(mlp(1, 8), selector="wandapp")
