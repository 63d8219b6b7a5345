"""Another basis is proved on the model itself: what changes its numbers keeps its basis, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.agreement import same_function
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Array
from onnxgrail.errors import ModelError, NothingToCompressError
from onnxgrail.graph.rotate.basis import Rotatable, rotate
from onnxgrail.narrowing import rotation
from tests.oracle import run
from tests.prenorm import VOCABULARY, prenorm
from tests.tiny import feed, tiny

CPU = ("CPUExecutionProvider",)


@pytest.mark.parametrize("fault", ["numbers", "graph"])
def test_what_changes_the_numbers_is_refused_by_name(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"ids": np.random.default_rng(3).integers(0, VOCABULARY, (32, 6))}
    choices: dict[str, Any] = {"data": data, "unit_ratio": 0.3, "round_to": 1, "blocks": ("stream", "qk", "vo", "mlp")}
    tried: list[tuple[str, ...]] = []
    usual = {b["name"] for b in narrowed(onnxgrail.compress(prenorm(depth=2), **choices))}

    def wrong(found: Rotatable, bases: Any) -> ir.Model:
        model = rotate(found, bases)
        tried.append(found.names)
        bad = tried[0][-1]
        if bad in found.names and fault == "graph":
            raise ModelError("the runtime does not run it")
        if bad in found.names:
            head = model.graph.outputs[0].producer()
            assert head is not None
            weight = head.inputs[1]
            assert weight is not None
            assert weight.const_value is not None
            weight.const_value = ir.tensor(1.1 * weight.const_value.numpy(), name=weight.name)
        return model

    monkeypatch.setattr(rotation, "rotate", wrong)
    result = onnxgrail.compress(prenorm(depth=2), **choices)
    refused = [one["value"] for one in result.report.data["refusals"] if one["reason"] == rotation.DIFFERS]
    assert refused == [tried[0][-1]]
    (missing,) = usual - {b["name"] for b in narrowed(result)}
    assert missing.endswith(".vo")


def narrowed(result: Any) -> list[dict[str, Any]]:
    return [block for block in result.report.data["blocks"] if block["kept"] < block["units"]]


def rounded(scale: float, noise: float) -> ir.Model:
    """A model whose sums all lie at a border of rounding, but for noise."""
    weight = (np.full((6, 8), scale) + noise).astype(np.float32)
    return tiny(
        "float[2,6] x => float[2,8] y", "a = MatMul(x, w)\nb = Round(a)\ny = Mul(b, s)", {"w": weight, "s": (8,)}
    )


def test_a_step_that_rounding_tips_is_no_difference() -> None:
    model, other = rounded(0.25, 0.0), rounded(0.25, -1e-7)
    given = {"x": np.ones((2, 6), np.float32)}
    facts = observe(model, feed(model))
    assert np.abs(run(model, given)["y"] - run(other, given)["y"]).max() > 0.1
    assert not same_function(model, other, given, CPU)
    assert same_function(model, other, given, CPU, facts)
    assert not same_function(model, rounded(0.2, 0.0), given, CPU, facts)


HEADS = """
    qm = MatMul(x, wq)
    qs = Reshape(qm, split)
    qt = Transpose<perm=[0,2,1,3]>(qs)
    km = MatMul(x, wk)
    ks = Reshape(km, split)
    kt = Transpose<perm=[0,2,3,1]>(ks)
    vm = MatMul(x, wv)
    vs = Reshape(vm, split)
    vt = Transpose<perm=[0,2,1,3]>(vs)
    s = MatMul(qt, kt)
    p = Softmax(s)
    o = MatMul(p, vt)
    t = Transpose<perm=[0,2,1,3]>(o)
    j = Reshape(t, join)
    y = MatMul(j, wo)
"""
SPLIT, JOIN = np.array([0, 0, 2, 4]), np.array([0, 0, 8])


def endless(*shape: int) -> Array:
    """A weight whose last number is infinite."""
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    weight.flat[-1] = np.inf
    return weight


def with_heads() -> tuple[ir.Model, Array]:
    """A model whose values are read by an infinite weight."""
    weights = {"wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": endless(8, 8), "split": SPLIT, "join": JOIN}
    inputs = np.random.default_rng(0).standard_normal((24, 5, 8)).astype(np.float32)
    return tiny("float[N,S,8] x => float[N,S,8] y", HEADS, weights), inputs


def with_table() -> tuple[ir.Model, Array]:
    """A model whose last id, which no data have, has an infinite row."""
    body = "e = Gather(table, x)\nr = Relu(e)\na = MatMul(r, w)\nb = Relu(a)\ny = MatMul(b, v)"
    weights = {"table": endless(200, 12), "w": (12, 40), "v": (40, 2)}
    return tiny("int64[N,S] x => float[N,S,2] y", body, weights), np.random.default_rng(0).integers(0, 199, (24, 5))


@pytest.mark.parametrize("make", [with_heads, with_table])
def test_infinite_weights_have_no_basis(make: Callable[[], tuple[ir.Model, Array]]) -> None:
    model, inputs = make()
    with pytest.raises(NothingToCompressError) as caught:
        onnxgrail.compress(model, data={"x": inputs}, ratio=0.3, blocks=("vo", "embedding"))
    report = caught.value.report
    assert isinstance(report, onnxgrail.Report)
    assert rotation.ENDLESS in [one["reason"] for one in report.data["refusals"]]


def test_an_infinite_weight_of_heads_is_named() -> None:
    model, inputs = with_heads()
    with pytest.raises(ModelError, match=r"weight wo of block .* holds NaN or infinity"):
        onnxgrail.compress(model, data={"x": inputs}, ratio=0.3)
