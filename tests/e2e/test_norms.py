"""`--norms`: activations brought back to the original's, on planted networks and on the embedded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Array
from onnxgrail.narrowing import norms
from tests.shorter import shorter
from tests.tiny import batch_norm, tiny

from . import nets

PAIRS = 4


def weights(model: ir.Model) -> dict[str, Array]:
    return {name: v.const_value.numpy() for name, v in model.graph.initializers.items() if v.const_value is not None}


def run(model: ir.Model, feed: dict[str, Array], *names: str) -> list[Array]:
    """Outputs, or tensors inside."""
    more = model.clone()
    inside = {v.name: v for n in more.graph for v in n.outputs}
    have = {v.name for v in more.graph.outputs}
    more.graph.outputs.extend(inside[n] for n in names if n not in have)
    with open_session(nets.to_bytes(more), Setup(optimise=False)) as session:
        found = session.run(feed)
    return [found[n] for n in names] if names else list(found.values())


def planted(*, norm: bool = False, bias: bool = True) -> ir.Model:
    """Eight hidden channels of which the last four say half of what the first four say, and weigh twice as much.

    Without them the second convolution makes exactly half of what it made, bias apart.
    """
    rng = np.random.default_rng(3)
    first = rng.normal(size=(PAIRS, 3, 3, 3))
    first /= np.abs(first).sum(axis=(1, 2, 3), keepdims=True) / 6
    second = rng.normal(size=(6, PAIRS, 3, 3)) / 4
    body = "k = Conv<pads=[1,1,1,1]>(x, w0, b0)\nr = Relu(k)\no = Conv<pads=[1,1,1,1]>(r, w1" + (
        ", b1)" if bias else ")"
    )
    body += "\nn = BatchNormalization(o, s, t, u, v)\nq = Relu(n)" if norm else "\nq = Relu(o)"
    body += "\ng = GlobalAveragePool(q)\nf = Flatten(g)\ny = Gemm(f, w2, b2)"
    found: dict[str, Any] = {
        "w0": np.concatenate([first, first / 2]).astype(np.float32),
        "b0": np.tile([0.2, 0.1], PAIRS).astype(np.float32) * np.repeat([1, 0.5], PAIRS).astype(np.float32),
        "w1": np.concatenate([second, second * 2], axis=1).astype(np.float32),
        "w2": (6, 5),
        "b2": (5,),
    }
    found |= {"b1": np.linspace(-1, 1, 6).astype(np.float32)} if bias else {}
    found |= batch_norm("stuv", 6) if norm else {}
    return tiny("float[N,3,6,6] x => float[N,5] y", body, found)


def maps(count: int = 40) -> dict[str, Array]:
    return {"x": np.random.default_rng(8).normal(size=(count, 3, 6, 6)).astype(np.float32)}


def halved(model: Any, data: Any, word: str, **more: Any) -> onnxgrail.Result:
    common: dict[str, Any] = {"unit_ratio": 0.5, "selector": "l1", "compensate": "none", "round_to": 1, "check": False}
    return onnxgrail.compress(model, data=data, held_out=0, norms=word, **common | more)


@pytest.mark.parametrize("norm", [False, True], ids=["conv", "batch norm"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_what_was_only_scaled_and_shifted_comes_back(*, norm: bool, bias: bool) -> None:
    model, data = planted(norm=norm, bias=bias), maps()
    wanted = run(model, data)[0]
    plain = halved(model, data, "none", include="Conv_0")
    (block,) = [b for b in plain.report.data["blocks"] if b["kept"] < b["units"]]
    assert block["kept_units"] == list(range(PAIRS))
    assert np.abs(run(plain.model, data)[0] - wanted).max() > 0.1
    repaired = halved(model, data, "repair", include="Conv_0")
    np.testing.assert_allclose(run(repaired.model, data)[0], wanted, atol=2e-5)
    (entry,) = repaired.report.data["norms"]
    assert (entry["node"], entry["kind"]) == ("n" if norm else "o", "repair")
    assert entry["outcome"] == {"status": "ok", "reason": "", "clamped": 0}
    assert entry["before"] > 1e-2
    assert entry["after"] < 1e-9


def test_a_fold_aims_at_the_average_of_mean_and_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_error", lambda pair, ledger: 1.0)  # channels drawn at random do not fold well
    model, data = planted(), maps()
    result = halved(model, data, "repair", include="Conv_2|Gemm", exclude="Conv_0", reducer="fold", unit_ratio=0.4)
    (block,) = [b for b in result.report.data["blocks"] if b["kept"] < b["units"]]
    cluster = np.array(block["members"][0]["cluster"])
    fitted = {"x": np.delete(data["x"], np.s_[3::4], axis=0)}
    old, new = run(model, fitted, "o")[0], run(result.model, fitted, "o")[0]
    (entry,) = result.report.data["norms"]
    assert entry["outcome"]["status"] == "ok"
    for unit in range(block["kept"]):
        for measure in (np.mean, np.std):
            goal = np.mean([measure(old[:, c]) for c in np.flatnonzero(cluster == unit)])
            assert measure(new[:, unit]) == pytest.approx(goal, abs=1e-4)


def test_constants_stay_where_others_do_not_hold_up() -> None:
    """The held-out samples are black and change nothing, so whatever is learned from the others is wrong for them."""
    model, data = planted(bias=False), maps()
    drawn = np.random.default_rng(1).normal(size=(2 * PAIRS, 3, 3, 3)).astype(np.float32)
    model.graph.initializers["w0"].const_value = ir.tensor(drawn, name="w0")
    model.graph.initializers["b0"].const_value = ir.tensor(np.zeros(2 * PAIRS, np.float32), name="b0")
    data["x"][3::4] = 0
    plain, result = (halved(model, data, word, include="Conv_0") for word in ("none", "repair"))
    (entry,) = result.report.data["norms"]
    assert entry["outcome"]["status"] == "plain"
    assert "held-out" in entry["outcome"]["reason"]
    assert entry["before"] == entry["after"]
    for name, array in weights(plain.model).items():
        np.testing.assert_array_equal(array, weights(result.model)[name])
    (taken,) = halved(model, maps(), "repair", include="Conv_0").report.data["norms"]
    assert taken["outcome"]["status"] == "ok"


@pytest.mark.parametrize("choice", ["none", "repair", "refit", "all"])
def test_ratio_zero_changes_nothing(choice: str) -> None:
    model = planted(norm=True)
    result = halved(model, maps(), choice, unit_ratio=0)
    assert result.report.data["norms"] == []
    for name, array in weights(model).items():
        np.testing.assert_array_equal(array, weights(result.model)[name])


# ---------------------------------------------------------------------------------------------------- normalisations

LAYER = "u = MatMul(x, up)\nr = Relu(u)\nd = MatMul(r, down)\na = Add(x, d)\n"
MEAN = "p = Pow(a, two)\nm = ReduceMean(p, last)\ne = Add(m, eps)\nt = Sqrt(e)\n"
NORMS = {
    "layer norm": "n = LayerNormalization(a, g, b)",
    "rms norm": "n = SimplifiedLayerNormalization(a, g)",
    "layer norm apart": f"c = ReduceMean(a, last)\nz = Sub(a, c)\n{MEAN.replace('Pow(a', 'Pow(z')}"
    "i = Div(z, t)\nj = Mul(i, g)\nn = Add(j, b)",
    "rms norm apart": f"{MEAN}i = Reciprocal(t)\nj = Mul(a, i)\nn = Mul(g, j)",
    "batch norm in front": "n = BatchNormalization(a, g, b, mean, variance)",
}


def normed(form: str, dtype: Any = np.float32) -> ir.Model:
    """A residual branch of two matrices, a norm after it, and a head."""
    known: dict[str, Any] = {"up": (6, 16), "down": (16, 6), "head": (6, 4), "last": np.array([-1])}
    known |= {"two": np.array(2, dtype), "eps": np.array(1e-5, dtype), "b": np.linspace(-1, 1, 6).astype(dtype)}
    known |= {"g": np.linspace(0.5, 2, 6).astype(dtype), "mean": np.zeros(6, dtype), "variance": np.ones(6, dtype)}
    body = f"{LAYER}{NORMS[form]}\ny = MatMul(n, head)"
    used = {n: a for n, a in known.items() if any(f"{n}{end}" in body.replace("(", " ") for end in (",", ")"))}
    rng = np.random.default_rng(4)
    for name, shape in used.items():
        if isinstance(shape, tuple):
            used[name] = (rng.normal(size=shape) * 0.7).astype(dtype)
    kind = "float" if dtype == np.float32 else "float16"
    length = "N" if form.startswith("batch") else "N,5"
    return tiny(f"{kind}[{length},6] x => {kind}[] y", body, used, recorded=False)


def tokens(form: str, dtype: Any = np.float32) -> dict[str, Array]:
    shape = (48, 6) if form.startswith("batch") else (48, 5, 6)
    return {"x": np.random.default_rng(9).normal(size=shape).astype(dtype)}


def solved(y: Array, t: Array, *, shifts: bool) -> tuple[Array, Array]:
    """Per channel least squares with a ridge around one; which ridge, every fourth sample says."""
    held = np.arange(len(y)) % 4 == 3
    fit = [np.moveaxis(a[~held], -1, 0).reshape(a.shape[-1], -1).astype(np.float64) for a in (y, t)]
    kept = [np.moveaxis(a[held], -1, 0).reshape(a.shape[-1], -1).astype(np.float64) for a in (y, t)]
    centre = [a.mean(axis=1, keepdims=True) if shifts else np.zeros((len(a), 1)) for a in fit]
    spread = np.square(fit[0] - centre[0]).mean(axis=1)
    best: tuple[float, Array, Array] | None = None
    for alpha in (1e-4, 1e-2, 1e-1, 1.0):
        ridge = alpha * spread.mean()
        rows = zip(fit[0] - centre[0], fit[1] - centre[1], spread, strict=True)
        scale = np.array([((a * b).mean() + ridge) / (s + ridge) for a, b, s in rows])
        shift = centre[1][:, 0] - scale * centre[0][:, 0]
        wrong = float(np.square(kept[0] * scale[:, None] + shift[:, None] - kept[1]).sum())
        if best is None or wrong < best[0]:
            best = wrong, scale, shift
    assert best is not None
    return best[1], best[2]


@pytest.mark.parametrize("form", NORMS)
def test_scale_and_bias_are_the_least_squares_ones(form: str) -> None:
    model, data, shifts = normed(form), tokens(form), "rms" not in form
    plain, result = (halved(model, data, word, blocks=("mlp",)) for word in ("none", "refit"))
    (entry,) = result.report.data["norms"]
    assert (entry["kind"], entry["outcome"]["status"]) == ("refit", "ok")
    assert entry["after"] < 0.999 * entry["before"]
    old, new = run(model, data, "n")[0], run(plain.model, data, "n")[0]
    scale, shift = solved(new, old, shifts=shifts)
    np.testing.assert_allclose(weights(result.model)["g"], weights(model)["g"] * scale, rtol=1e-4)
    if shifts:
        np.testing.assert_allclose(weights(result.model)["b"], weights(model)["b"] * scale + shift, atol=1e-4)
    assert len(result.model.graph) == len(plain.model.graph)
    goal, before, after = (run(m, data)[0] for m in (model, plain.model, result.model))
    held = np.s_[3::4]
    wrong = [np.square(y - goal)[held].sum() / np.square(goal[held]).sum() for y in (before, after)]
    np.testing.assert_allclose([entry["before"], entry["after"]], wrong, rtol=1e-4)


def test_half_precision_stays_and_is_clipped() -> None:
    """Half of what the matrices made is gone, so the scale has to double, beyond what half precision holds."""
    rng = np.random.default_rng(2)
    up, down = np.abs(rng.normal(size=(6, PAIRS))) + 0.1, rng.normal(size=(PAIRS, 5))
    up /= np.abs(up).sum(axis=0)
    arrays = {
        "up": np.concatenate([up, up / 2], axis=1),
        "down": np.concatenate([down, down * 2]) / 100,
        "g": np.full(5, 4e4),
        "b": np.zeros(5),
        "mean": np.zeros(5),
        "variance": np.ones(5),
        "head": np.full((5, 2), 1e-2),
    }
    body = "u = MatMul(x, up)\nr = Relu(u)\na = MatMul(r, down)\nn = BatchNormalization(a, g, b, mean, variance)\n"
    halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    model = tiny("float16[N,6] x => float16[N,2] y", f"{body}y = MatMul(n, head)", halves, recorded=False)
    result = halved(model, {"x": rng.normal(size=(48, 6)).astype(np.float16)}, "refit", include="MatMul_0")
    assert weights(result.model)["b"].dtype == np.float16
    np.testing.assert_array_equal(weights(result.model)["g"], np.full(5, np.finfo(np.float16).max))


def test_all_is_both() -> None:
    body = LAYER.replace("MatMul(x, up)", "Conv(x, up)").replace("MatMul(r, down)", "Conv(r, down)")
    body += "n = InstanceNormalization(a, g, b)\nq = Relu(n)\ny = Conv(q, head)"
    shapes = {"up": (16, 3, 1, 1), "down": (3, 16, 1, 1), "head": (2, 3, 1, 1), "g": (3,), "b": (3,)}
    model = tiny("float[N,3,6,6] x => float[] y", body, shapes)
    kinds = {
        word: [e["kind"] for e in halved(model, maps(), word, blocks=("conv",)).report.data["norms"]]
        for word in ("none", "repair", "refit", "all")
    }
    assert kinds["none"] == []
    assert kinds["repair"] == ["repair"] * 2
    assert kinds["refit"] == ["refit"]
    assert kinds["all"] == ["repair", "refit", "repair"]


@pytest.mark.parametrize(
    "choices", [{"compensate": "best"}, {"allocate": "global", "unit_ratio": 0.3}, {"reducer": "fold"}]
)
def test_with_everything_else(choices: dict[str, Any]) -> None:
    """No entry promises what it does not hold, and the file runs."""
    model, data = nets.convnet(), nets.images()
    common: dict[str, Any] = {"unit_ratio": 0.5, "round_to": 1}
    result = onnxgrail.compress(model, data=data, norms="all", **common | choices)
    assert result.report.data["norms"]
    assert all(e["after"] <= e["before"] for e in result.report.data["norms"])
    assert result.report.data["verification"]["checker"] is True


# ------------------------------------------------------------------------------------------------ the embedded models


def judged(name: str, folder: Path, **choices: Any) -> tuple[float, float]:
    """Score on labelled data, and distance of the outputs."""
    found = shorter(name, folder) if name == "char_llama" else models.load(name)
    target = folder / f"{len(list(folder.iterdir()))}.onnx"
    result = onnxgrail.compress(found.model, target, data=found.calibration, **choices)
    with open_session(target) as session:
        score = models.score(found, lambda feed: list(session.run(feed).values()))
    return score, result.report.data["verification"]["outputs"][0]["nmse"]


@pytest.mark.parametrize("choices", [{"selector": "l1"}, {"reducer": "fold"}], ids=["l1", "fold"])
def test_repair_brings_the_digits_back(choices: dict[str, Any], tmp_path: Path) -> None:
    common: dict[str, Any] = {"unit_ratio": 0.5, "blocks": ("conv",), "compensate": "none", **choices}
    plain, repaired = (judged("digits_resnet", tmp_path, norms=word, **common) for word in ("none", "repair"))
    assert repaired[0] > max(plain[0] + 0.5, 0.85)
    assert repaired[1] < 0.4 * plain[1]


def test_repair_helps_grail_and_does_not_hurt_best(tmp_path: Path) -> None:
    common: dict[str, Any] = {"unit_ratio": 0.7, "blocks": ("conv",), "selector": "wanda", "compensate": "grail"}
    common["closed_loop"] = True
    grail, repaired = (judged("digits_resnet", tmp_path, norms=word, **common) for word in ("none", "repair"))
    assert repaired[0] > grail[0] + 0.3
    common["compensate"] = "best"
    best, repaired = (judged("digits_resnet", tmp_path, norms=word, **common) for word in ("none", "repair"))
    assert repaired[0] >= best[0] - 0.01
    assert repaired[1] < 1.05 * best[1]


def test_refit_does_not_hurt_the_vision_transformer(tmp_path: Path) -> None:
    common: dict[str, Any] = {"unit_ratio": 0.5, "blocks": ("mlp", "heads"), "compensate": "none"}
    plain, refitted = (judged("digits_vit", tmp_path, norms=word, **common) for word in ("none", "refit"))
    assert refitted[0] >= plain[0] - 0.01
    assert refitted[1] < plain[1]


def test_refit_helps_the_language_model(tmp_path: Path) -> None:
    common: dict[str, Any] = {"unit_ratio": 0.5, "blocks": ("mlp", "heads"), "compensate": "none", "samples": 64}
    plain, refitted = (judged("char_llama", tmp_path, norms=word, **common) for word in ("none", "refit"))
    assert refitted[0] < 0.95 * plain[0]
