"""Another basis is proved on the model itself: what changes its numbers keeps its basis, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.agreement import same_function
from onnxgrail.calibration.observe import observe
from onnxgrail.errors import ModelError
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
