"""Notes about inputs and outputs that lost positions: ours come back, and those of anybody else do no harm."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.graph.rewrite.interface import NOTE, Port, between, fit, note, noted

GOOD = {"name": "x", "axis": 1, "before": 6, "after": 2, "kept": [1, 4]}


def model(text: str | None = None) -> ir.Model:
    head = '<ir_version: 8, opset_import: ["" : 17]> '
    made = ir.from_onnx_text(head + "g (float[2, 2] x) => (float[2, 2] y) { y = Relu(x) }")
    if text is not None:
        made.metadata_props[NOTE] = text
    return made


def test_a_note_comes_back_and_cuts() -> None:
    narrow = model()
    note(narrow, [Port(**{**GOOD, "kept": (1, 4)})])
    assert [port.noted() for port in noted(narrow)] == [{**GOOD, "kept": (1, 4)}]
    cut = fit({"x": np.arange(12.0).reshape(2, 6), "z": np.zeros(3)}, between(model(), narrow))
    np.testing.assert_array_equal(cut["x"], [[1, 4], [7, 10]])
    assert cut["z"].shape == (3,)


@pytest.mark.parametrize(
    "change",
    [{"kept": [1, 9]}, {"kept": [4, 1]}, {"kept": [1, 1]}, {"kept": ["a", 4]}, {"kept": 3}, {"kept": [True, 4]},
     {"after": 3}, {"before": 2**70}, {"axis": -1}, {"axis": None}, {"name": 1}, {"more": 1}, {"kept": [], "after": 0}],
)  # fmt: skip
def test_a_note_that_contradicts_itself_is_none(change: dict[str, object]) -> None:
    assert noted(model(json.dumps([GOOD]))) != ()
    assert noted(model(json.dumps([{**GOOD, **change}]))) == ()


@pytest.mark.parametrize("text", ["", "null", "{}", "[1]", '"x"', "[[]]", "nothing", "[" * 10**5])
def test_notes_of_others_are_none(text: str) -> None:
    assert noted(model(text)) == ()
    assert between(model(text), model(text)) == ()


@pytest.mark.parametrize("change", [{"axis": 5}, {"before": 2**30, "kept": [1, 2**29]}])
def test_a_note_that_does_not_fit_the_arrays_leaves_them(change: dict[str, object]) -> None:
    x = np.zeros((2, 6))
    assert fit({"x": x}, between(model(), model(json.dumps([{**GOOD, **change}]))))["x"].shape == x.shape
