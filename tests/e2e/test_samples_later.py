"""Outputs in which the axis that counts samples is not the first, as recurrent networks have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import Array
from tests.tiny import classes, ints, tiny
from tests.tiny import feed as fed

BODY = "a = MatMul(x, w)\nb = Relu(a)\nc = MatMul(b, v)\n"
WEIGHTS: dict[str, Any] = {"w": (16, 64), "v": classes(64, 5)}
ROWS = {"x": np.random.default_rng(0).standard_normal((96, 16), dtype=np.float32)}
STEPS = {"x": np.random.default_rng(0).standard_normal((96, 7, 16), dtype=np.float32)}
CASES = {
    "classes": ("float[N,16] x => float[{}] y", "N,5", "5,N", "[1,0]", ROWS),
    "steps": ("float[N,T,16] x => float[{}] y", "N,T,5", "T,N,5", "[1,0,2]", STEPS),
}


def pair(name: str) -> tuple[ir.Model, ir.Model, dict[str, Array]]:
    """A model with samples first, and one that gives the same with samples second."""
    signature, first, second, order, data = CASES[name]
    one = tiny(signature.format(first), BODY + "y = Identity(c)", WEIGHTS, recorded=False)
    two = tiny(signature.format(second), BODY + f"y = Transpose<perm={order}>(c)", WEIGHTS, recorded=False)
    return one, two, data


@pytest.mark.parametrize("name", CASES)
def test_they_are_judged_like_outputs_with_samples_first(name: str) -> None:
    *made, data = pair(name)
    found = []
    for model in made:
        slim = onnxgrail.compress(model, data=data, unit_ratio=0.4, compensate="grail", held_out=0).model
        found += [onnxgrail.compare(model, slim, data=data, batch_size=size) for size in (8, 96)]
    lines = {str(one.headline()) for one in found}
    assert len(lines) == 1
    assert "on 96 samples" in lines.pop()
    assert {one.outputs[0].samples for one in found} == {96}


@pytest.mark.parametrize("name", CASES)
def test_a_search_finds_the_same_widths(name: str) -> None:
    *made, data = pair(name)
    runs = [onnxgrail.compress(model, data=data, max_loss=0.05, minimize="params").report.data for model in made]
    first, second = ([block["kept"] for block in run["blocks"]] for run in runs)
    assert first == second
    tried = [[one["loss"]["bound"] for one in run["allocation"]["search"]["tried"] if one["loss"]] for run in runs]
    assert tried[0] == pytest.approx(tried[1])


def test_an_axis_is_moved_only_if_its_name_is_that_of_all_samples() -> None:
    """Here, the first axis of the state is no sample, so nothing says what the name of the other one counts."""
    body = "a = MatMul(x, w)\nb = Relu(a)\nc = MatMul(b, v)\nd = Unsqueeze(c, zero)\nz = Add(d, s)\ny = Identity(c)"
    model = tiny("float[N,16] x, float[1,N,5] s => float[N,5] y, float[1,N,5] z", body, {**WEIGHTS, "zero": ints(0)})
    data = fed(model)
    found = onnxgrail.compare(model, model, data=[data, data])
    assert [(one.name, one.samples) for one in found.outputs] == [("y", 2 * len(data["x"])), ("z", 2)]
