"""The proof before anything is decided: a rule that lies is caught, and costs only the blocks it lies about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.allocation.balance import by_units
from onnxgrail.calibration import agreement
from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.proof import prove
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import Array, Block, Refusal
from onnxgrail.graph.ops import rule
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.survey import Survey
from tests.oracle import survey_of
from tests.tiny import cnn, drawn, feed, ints, mlp, tiny


def proved(model: ir.Model, survey: Survey) -> tuple[tuple[Block, ...], tuple[Refusal, ...]]:
    kept = by_units(survey.blocks, 0.4, 1)
    return prove(trial_of(model, survey, feed(model), CPU), survey.blocks, kept)


def passing(site: Site) -> None:
    """A rule that lets everything through."""
    site.emit(site.marks(0))


def three_layers(op: str) -> ir.Model:
    """Three matrices' hidden widths, the middle one after an op."""
    return tiny(
        "float[N,5] x => float[] y",
        f"a = MatMul(x, w0)\nb = Relu(a)\nc = MatMul(b, w1)\nd = {op}\ne = MatMul(d, w2)\n"
        "f = Relu(e)\ny = MatMul(f, w3)",
        {"w0": (5, 8), "w1": (8, 7), "w2": (7, 6), "w3": (6, 4), "scale": (7,), "axis": ints(1), "shape": ints(-1, 7)},
    )


@pytest.mark.parametrize("model", [mlp(3), cnn()], ids=["mlp", "cnn"])
def test_sound_blocks_pass(model: ir.Model) -> None:
    survey = survey_of(model, feed(model))
    assert proved(model, survey) == (survey.blocks, ())


@pytest.mark.parametrize(
    ("op", "text", "words"),
    [
        ("Softmax", "Softmax(c)", "differs from the masked one"),
        ("LayerNormalization", "LayerNormalization(c, scale)", "narrowed graph"),
        ("CumSum", "CumSum(c, axis)", "differs from the masked one"),
    ],
)
def test_a_rule_that_lies_costs_one_block(monkeypatch: pytest.MonkeyPatch, op: str, text: str, words: str) -> None:
    monkeypatch.setitem(rule._RULES, ("", op), [(1, passing)])
    model = three_layers(text)
    survey = survey_of(model, feed(model))
    assert sorted(b.units for b in survey.blocks) == [6, 7, 8]
    blocks, refusals = proved(model, survey)
    assert sorted(b.units for b in blocks) == [6, 8]
    (refusal,) = refusals
    assert refusal.value == "w1"
    assert words in refusal.reason


def test_a_rewrite_that_is_missing_costs_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rule._NARROWS, ("", "Reshape"))
    model = three_layers("Reshape(c, shape)")
    blocks, (refusal,) = proved(model, survey_of(model, feed(model)))
    assert sorted(b.units for b in blocks) == [6, 8]
    assert "does not run" in refusal.reason


def test_several_liars_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rule._RULES, ("", "Softmax"), [(1, passing)])
    layers, source = [], "x"
    weights: dict[str, tuple[int, ...]] = {}
    for i in range(7):
        act = "Softmax" if i in {1, 4} else "Tanh"
        layers.append(f"h{i} = MatMul({source}, u{i})\nr{i} = {act}(h{i})\nz{i} = MatMul(r{i}, d{i})")
        weights |= {f"u{i}": (5, 6 + i), f"d{i}": (6 + i, 5)}
        source = f"z{i}"
    body = "\n".join(layers).replace("z6", "y")
    model = tiny("float[N,5] x => float[] y", body, weights)
    survey = survey_of(model, feed(model))
    blocks, refusals = proved(model, survey)
    assert {r.value for r in refusals} == {"u1", "u4"}
    assert len(blocks) + len(refusals) == len(survey.blocks)


def test_the_model_is_not_changed() -> None:
    model = cnn()
    before = ir.to_proto(model).SerializeToString()
    proved(model, survey_of(model, feed(model)))
    assert ir.to_proto(model).SerializeToString() == before


def test_not_a_number_in_both_is_no_difference() -> None:
    model = tiny(
        "float[N,5] x => float[] y, float[] z",
        "h = MatMul(x, w0)\nr = Relu(h)\ny = MatMul(r, w1)\nz = Sqrt(x)",
        {"w0": (5, 8), "w1": (8, 4)},
    )
    survey = survey_of(model, feed(model))
    assert (feed(model)["x"] < 0).any()
    assert proved(model, survey)[1] == ()


def scores(op: str) -> ir.Model:
    """Scores that are all nearly zero, of a hidden layer after an op."""
    model = tiny(
        "float[N,5] x => float[] y",
        f"a = MatMul(x, w0)\nb = {op}\nc = MatMul(b, w1)\nd = Sub(c, thirteen)\ne = Sigmoid(d)\ny = Reshape(e, shape)",
        {"w0": (5, 8), "w1": (8, 6), "thirteen": (1,), "shape": ints(-1, 3, 2)},
    )
    thirteen = ir.tensor(np.full(1, 13, np.float32), name="thirteen")
    model.graph.initializers["thirteen"].const_value = thirteen
    return model


def rounded(run: Callable[..., list[dict[str, Array]]]) -> Callable[..., list[dict[str, Array]]]:
    """Runs in which the scores of the narrowed graph are off by the last bit of 1, as runtimes compute sigmoids."""

    def changed(*args: object, whole: bool = False) -> list[dict[str, Array]]:
        found = run(*args, whole=whole)
        return [feed | {"y": feed["y"] + np.float32(6e-8) * whole} for feed in found]

    return changed


def test_scores_that_are_nearly_zero_are_compared_before_the_sigmoid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_run", rounded(agreement._run))
    model = scores("Relu(a)")
    survey = survey_of(model, feed(model))
    assert proved(model, survey) == (survey.blocks, ())
    monkeypatch.setitem(rule._RULES, ("", "Softmax"), [(1, passing)])
    model = scores("Softmax(a)")
    blocks, refusals = proved(model, survey_of(model, feed(model)))
    assert not blocks
    assert "differs from the masked one" in refusals[0].reason


@pytest.mark.parametrize(("half", "most"), [(False, 1e-3), (True, 1e-2)])
def test_sums_of_half_precision_round_alike_beside_integers(
    half: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelOpt writes 8 bits between layers in half precision, whose sums in another order differ by more."""
    kind, element = (np.float16, "float16") if half else (np.float32, "float")
    weights = {"w": (12, 16), "v": (16, 4)}
    made = {name: drawn(np.random.default_rng(1), shape).astype(kind) for name, shape in weights.items()}
    constants = {"s": np.array(0.05, kind), "z": np.array(0, np.int8)}
    body = "a = MatMul(x, w)\nr = Relu(a)\nq = QuantizeLinear(r, s, z)\nh = DequantizeLinear(q, s, z)\ny = MatMul(h, v)"
    model = tiny(f"{element}[N,12] x => {element}[N,4] y", body, made | constants, opset=19)
    survey = survey_of(model, feed(model))
    run = agreement._run

    def off(*args: Any, whole: bool = False) -> list[dict[str, Array]]:
        return [
            {n: (a * (1 + error * whole)).astype(a.dtype) if a.dtype == kind else a for n, a in one.items()}
            for one in run(*args, whole=whole)
        ]

    monkeypatch.setattr(agreement, "_run", off)
    error = most / 2
    assert proved(model, survey) == (survey.blocks, ())
    error = 4 * most
    assert proved(model, survey)[0] == ()
