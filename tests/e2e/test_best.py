"""`--compensate best` against its formula: every reader fitted, on all rows at once, after the ones already fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.algebra.select.selectors.auto import Auto
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.stream import stream
from onnxgrail.machine import amounts
from onnxgrail.machine.job import Job
from onnxgrail.narrowing import best, layers
from onnxgrail.narrowing.decide import Decision, planned, settled
from onnxgrail.options import FITS
from onnxgrail.recipe.check import recipe_of
from tests.oracle import run
from tests.tiny import cnn, feed, mlp, tiny

ROWS, WIDTH, HIDDEN = 200, 6, 16


def net() -> Any:
    """Two layers beside a residual connection: hidden = relu(stream w), stream + hidden v."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (WIDTH, HIDDEN), "v0": (HIDDEN, WIDTH), "w1": (WIDTH, HIDDEN), "v1": (HIDDEN, WIDTH)}
    weights: dict[str, Any] = {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}
    text = """
        a = MatMul(x, w0)
        h0 = Relu(a)
        b = MatMul(h0, v0)
        s = Add(b, x)
        c = MatMul(s, w1)
        h1 = Relu(c)
        d = MatMul(h1, v1)
        y = Add(d, s)
    """
    return ir.to_proto(tiny("double[N,6] x => double[N,6] y", text, weights)), weights


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, Any], Any, Decision]:
    model, weights = net()
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)) + 1.0  # so that a bias pays
    choices = {"selector": "wanda", "unit_ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "samples": ROWS}
    recipe = recipe_of(choices)
    job = Job(recipe=recipe)
    return weights, x, settled(planned(prepare(model, {"x": x}, job, held_out=0), job), job)


def fitted(z: Any, target: Any, start: Any, alpha: float, *, affine: bool) -> tuple[Any, Any]:
    """Ridge around a start; a free bias is centring both sides."""
    lam = alpha * np.square(z).sum() / z.shape[1]
    mean = (z.mean(axis=0), target.mean(axis=0)) if affine else (np.zeros(z.shape[1]), np.zeros(target.shape[1]))
    centred = z - mean[0]
    gram = centred.T @ centred + lam * np.eye(z.shape[1])
    weights = np.linalg.solve(gram, centred.T @ (target - mean[1]) + lam * start)
    return weights, mean[1] - mean[0] @ weights


def test_weights_are_those_of_the_formula(made: tuple[dict[str, Any], Any, Decision]) -> None:
    weights, x, decision = made
    assert [refit.weight for refit in decision.refits] == ["v0", "w1", "v1"]
    refits = {refit.weight: refit for refit in decision.refits}
    arrays, shifts = decision.ledger.arrays, decision.ledger.shifts

    def check(name: str, z: Any, target: Any, start: Any, got: Any) -> Any:
        """The weights are those that were kept and a share of the way to the ridge solution; returns what they make."""
        one = refits[name]
        shift, affine = shifts.get(one.node, np.zeros(1)), name != "w1"  # no inputs lost, no bias there: none is made
        assert one.alpha is not None
        step, bias = fitted(z, target, start, one.alpha, affine=affine)
        np.testing.assert_allclose(got, start + one.blend * (step - start), rtol=0, atol=1e-4)
        np.testing.assert_allclose(shift + np.zeros_like(bias), one.blend * bias, rtol=0, atol=1e-4)
        return z @ got + shift

    stream = dense = x
    for k, change in enumerate(decision.changes):
        w, v, kept = weights[f"w{k}"], weights[f"v{k}"], change.reducer.kept
        assert len(kept) == HIDDEN // 2
        hidden, inner = np.maximum(dense @ w, 0), (stream @ w)[:, kept]
        if k:  # its input is no longer what it was
            inner = check("w1", stream, (dense @ w)[:, kept], w[:, kept], arrays["w1"][:, kept])
        dense = dense + hidden @ v
        stream = stream + check(f"v{k}", np.maximum(inner, 0), dense - stream, v[kept], arrays[f"v{k}"][kept])


def test_it_is_closer_than_what_is_fitted_block_by_block(made: tuple[dict[str, Any], Any, Decision]) -> None:
    assert all(refit.after < refit.before for refit in made[2].refits)


def test_the_report_tells_errors_of_the_fits(made: tuple[dict[str, Any], Any, Decision]) -> None:
    refits = {refit.weight: refit for refit in made[2].refits}
    for k, change in enumerate(made[2].changes):
        one = refits[f"v{k}"]
        assert (change.error.plain, change.error.compensated, change.error.validation) == (
            one.before,
            one.after,
            one.after,
        )
        assert change.outcome.status == "ok"


def test_a_block_that_no_fit_helps_says_so() -> None:
    """Its units put out nothing but zeros, whoever goes."""
    weights = {"w1": np.ones((6, 8)), "b1": np.full(8, -100.0), "w2": np.ones((8, 4))}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    model = tiny("float[N,6] x => float[N,4] y", "g = Gemm(x, w1, b1)\nr = Relu(g)\ny = MatMul(r, w2)", weights)
    x = np.random.default_rng(1).random((ROWS, 6)).astype(np.float32)
    result = onnxgrail.compress(ir.to_proto(model), data={"x": x}, unit_ratio=0.5, round_to=1, selector="wanda")
    (entry,) = result.report.data["blocks"]
    outcome = entry["outcome"]
    assert (outcome["status"], outcome["reason"]) == ("plain", best.WORSE)


@pytest.mark.parametrize(
    ("choices", "alone"),
    [
        ({}, False),
        ({"selector": "wanda"}, True),
        ({"selector": "flap"}, True),
        ({"selector": "obs"}, False),
        ({"reducer": "fold-gram"}, False),
        ({"compensate": "grail"}, False),
        ({"samples": 60}, True),  # `auto` would read them from 8 rows per channel
        ({"samples": 60, "selector": "obs"}, False),
        ({"samples": 60, "reducer": "fold-gram"}, False),
    ],
)
def test_products_of_channels_are_only_measured_where_something_reads_them(
    choices: dict[str, Any], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    measure = stream.Stream.measure
    monkeypatch.setitem(SELECTORS, "auto", Auto(small=0))
    monkeypatch.setattr(
        stream.Stream,
        "measure",
        lambda self, probes, *rest: asked.extend(p.alone for p in probes) or measure(self, probes, *rest),
    )
    model, _ = net()
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float64)
    onnxgrail.compress(
        model,
        data={"x": x},
        **{"unit_ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "check": False, "held_out": 0} | choices,
    )
    assert set(asked) == {alone}


def test_a_dip_does_not_end_the_search_for_a_ridge() -> None:
    """The first MLP of the Llama reads a few huge features: strong ridges gain a trace, the weakest one a tenth."""
    entry = models.load("char_llama")
    choices: Any = {"unit_ratio": 0.5, "blocks": ("mlp", "heads"), "check": False, "dry_run": True}
    refits = onnxgrail.compress(entry.model, data=entry.calibration, **choices).report.data["refits"]
    gates = [r for r in refits if r["alpha"] is not None and r["alpha"] <= 1e-5 and r["after"] < 0.95 * r["before"]]
    assert len(gates) >= 2


@pytest.mark.parametrize(("rows", "hidden"), [(12, 64), (80, 160)], ids=["few samples", "few rows per feature"])
def test_few_rows_do_not_spoil_it(rows: int, hidden: int) -> None:
    """Weights made from all rows would be judged by the very rows they were made from."""
    rng = np.random.default_rng(5)
    text = "a = MatMul(x, w1)\nr = Relu(a)\ny = MatMul(r, w2)"
    model = ir.to_proto(tiny("float[N,12] x => float[N,8] y", text, {"w1": (12, hidden), "w2": (hidden, 8)}))
    x, unseen = (rng.standard_normal((count, 12)).astype(np.float32) for count in (rows, 2000))
    wanted = run(model.SerializeToString(), {"x": unseen})["y"]

    def loss(compensate: str) -> float:
        choices: Any = {"unit_ratio": 0.5, "round_to": 1, "compensate": compensate, "check": False, "held_out": 0}
        made = onnxgrail.compress(model, data={"x": x}, **choices)
        return float(np.square(run(made.to_bytes(), {"x": unseen})["y"] - wanted).mean())

    assert loss("best") < min(loss("grail"), 1.05 * loss("none"))


def test_nothing_that_can_be_fitted() -> None:
    """The only reader is no plain product: it keeps GRAIL's weights."""
    text = 'h = MatMul(x, w1)\nr = Relu(h)\ny = Einsum<equation="nh,ho->no">(r, w2)'
    model = tiny("float[N,6] x => float[N,4] y", text, {"w1": (6, 8), "w2": (8, 4)})
    x = np.random.default_rng(1).standard_normal((ROWS, 6)).astype(np.float32)
    result = onnxgrail.compress(ir.to_proto(model), data={"x": x}, unit_ratio=0.5, round_to=1, compensate="best")
    assert result.report.data["refits"] == []
    assert result.report.data["blocks"][0]["kept"] == 4


@pytest.mark.parametrize("part", FITS)
def test_every_part_of_the_fit_can_be_left_out(part: str) -> None:
    """And matters: without it other weights come out, without any of them still some fit."""
    rng = np.random.default_rng(0)
    text = "a = Conv(x, w0)\nb = Relu(a)\nc = Conv<pads=[1,1,1,1]>(b, w1)\nd = Relu(c)\n"
    text += "e = Conv(d, w2)\nf = Relu(e)\ny = Conv(f, w3)"  # `e` is an output: its channels stay
    shapes = {"w0": (8, 3, 1, 1), "w1": (8, 8, 3, 3), "w2": (4, 8, 1, 1), "w3": (2, 4, 1, 1)}
    model = ir.to_proto(tiny("float[N,3,5,5] x => float[N,4,5,5] e, float[N,2,5,5] y", text, shapes))
    x = rng.standard_normal((80, 3, 5, 5)).astype(np.float32)

    def made(fit: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
        choices = {
            "unit_ratio": 0.5,
            "round_to": 1,
            "blocks": ("conv",),
            "compensate": "best",
            "fit": fit,
            "check": False,
        }
        result = onnxgrail.compress(model, data={"x": x}, **choices)
        found = result.model.graph.initializers.values()
        return result.report.data["refits"], {v.name: v.const_value.numpy() for v in found}

    refits, whole = made(FITS)
    fewer, without = made(tuple(p for p in FITS if p != part))
    assert any(name not in without or not np.array_equal(whole[name], without[name]) for name in whole)
    assert refits
    if part == "patch":
        assert {r["weight"] for r in fewer} == {"w2", "w3"}
    if part == "blend":
        assert {r["blend"] for r in fewer} <= {0.0, 1.0}


def quantised() -> Any:
    """A product with stored int8 weights, between two plain ones."""
    text = """
        a = MatMul(x, w0)
        b = Relu(a)
        w = DequantizeLinear<axis=1>(q, s)
        c = MatMul(b, w)
        d = Relu(c)
        y = MatMul(d, w2)
    """
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {"w0": (6, 8), "q": rng.integers(-127, 128, (8, 24)).astype(np.int8), "w2": (24, 4)}
    return tiny("float[N,6] x => float[N,4] y", text, weights | {"s": rng.uniform(0.001, 0.01, 24).astype(np.float32)})


def biased() -> Any:
    """Gemms with a bias that is computed, and with one number for all outputs."""
    text = """
        a = MatMul(x, w0)
        b = Relu(a)
        k = Abs(k0)
        c = Gemm(b, w1, k)
        d = Relu(c)
        e = Gemm(d, w2, one)
        f = Relu(e)
        y = MatMul(f, w3)
    """
    weights: dict[str, Any] = {"w0": (6, 8), "k0": (12,), "w1": (8, 12), "w2": (12, 10), "w3": (10, 4)}
    return tiny("float[N,6] x => float[N,4] y", text, weights | {"one": np.full(1, 0.7, np.float32)})


@pytest.mark.parametrize("make", [mlp, cnn, quantised, biased])
@pytest.mark.parametrize("samples", [200, 32], ids=["batches", "an only batch"])
def test_sums_with_the_dense_input_give_the_same_weights(
    make: Callable[[], ir.Model], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a window, with a bias, with a stored weight; layers whose outputs carry more than that go without."""
    model = make()
    ways: list[bool] = []
    through = layers.Stage.through.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(layers.Stage, "through", property(lambda self: ways.append(through(self)) or ways[-1]))

    def fitted(wider: float) -> tuple[list[Any], dict[str, Any]]:
        monkeypatch.setattr(layers, "WIDER", wider)
        ways.clear()
        data = {"x": feed(model, N=samples)["x"] + np.float32(0.5)}
        choices: Any = {
            "unit_ratio": 0.4,
            "round_to": 1,
            "blocks": ("conv", "mlp"),
            "compensate": "best",
            "check": False,
        }
        result = onnxgrail.compress(model, data=data, **choices)
        return result.report.data["refits"], numbers_of(result)

    (rows, want), plain = fitted(np.inf), any(ways)
    (others, got), wide = fitted(0.0), any(ways)
    assert (plain, wide) == (False, True)
    assert rows
    assert [(r["weight"], r["alpha"]) for r in others] == [(r["weight"], r["alpha"]) for r in rows]
    tolerance = 2e-2 if make is quantised else 2e-3  # where a stored integer rounds to the next one, the rest follows
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, atol=tolerance * max(float(np.abs(array).max()), 1e-6))


def numbers_of(result: Any) -> dict[str, Any]:
    """All weights in floating point."""
    arrays = {v.name: v.const_value.numpy() for v in result.model.graph.initializers.values()}
    return {name: array.astype(np.float64) for name, array in arrays.items() if array.dtype.kind == "f"}


def test_a_layer_whose_sums_would_be_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps GRAIL's weights; a larger cache budget brings it back."""
    model, _ = net()
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float64) + 1.0
    choices = {"unit_ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "check": False}
    wide = 8 * (5 * (HIDDEN // 2) ** 2 + 12 * WIDTH * HIDDEN // 2)  # what v0 and v1 need, w1 needs less
    monkeypatch.setattr(amounts, "FIT", wide - 1)
    small = onnxgrail.compress(model, data={"x": x}, cache_budget="16", **choices)
    entries = {entry["weight"]: entry for entry in small.report.data["refits"]}
    assert set(entries) == {"v0", "w1", "v1"}
    for name in ("v0", "v1"):
        assert "--cache-budget" in entries[name]["reason"]
        assert (entries[name]["alpha"], entries[name]["before"], entries[name]["after"]) == (None, None, None)
    assert entries["w1"]["reason"] == ""
    assert any("2 layers were not fitted" in note for note in small.report.data["notes"])
    large = onnxgrail.compress(model, data={"x": x}, cache_budget=str(wide), **choices)
    assert not any(entry["reason"] for entry in large.report.data["refits"])
