"""Biases that make up for the mean error of rounded weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.calibration.quantize.shifts import shifts_of
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.graph.bits.folded import folded
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import tiny

RNG = np.random.default_rng(5)
SHIFTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Conv": ("float[N,8,6,6] x => float[N,16,4,4] y", "y = Conv(x, w, b)", {"w": (16, 8, 3, 3), "b": (16,)}),
    "Conv without bias": ("float[N,8,6,6] x => float[N,16,6,6] y", "y = Conv(x, w)", {"w": (16, 8, 1, 1)}),
    "one axis": ("float[N,8,6] x => float[N,16,4] y", "y = Conv(x, w, b)", {"w": (16, 8, 3), "b": (16,)}),
    "ConvTranspose": (
        "float[N,8,6,6] x => float[N,16,7,7] y",
        "y = ConvTranspose<group = 2>(x, w, b)",
        {"w": (8, 8, 2, 2), "b": (16,)},
    ),
    "Gemm": ("float[N,16] x => float[N,24] y", "y = Gemm<alpha = 0.5>(x, w, b)", {"w": (16, 24), "b": (1, 24)}),
}


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("name", SHIFTED)
def test_biases_make_up_for_the_mean_error_of_rounded_weights(name: str, opset: int) -> None:
    """Inputs with a mean shift what rounded weights compute; a bias that others read, too, stays."""
    signature, body, weights = SHIFTED[name]
    model = tiny(signature, body, weights)
    model.graph.opset_imports[""] = opset
    shape = [size if isinstance(size, int) else 64 for size in model.graph.inputs[0].shape or ()]
    x = (2 + RNG.normal(size=shape)).astype(np.float32)
    shifts = shifts_of(model, [{"x": x[:40]}, {"x": x[40:]}])
    assert set(shifts) == {"w"}
    runs = []
    for one in (model, folded(model), folded(model, shifts=shifts)):
        with open_session(to_bytes(one)) as session:
            found = np.asarray(session.run({"x": x})["y"], np.float64)
        runs.append(found.mean(axis=tuple(axis for axis in range(found.ndim) if axis != 1)))
    wanted, plain, shifted = runs
    assert np.abs(plain - wanted).max() > 1e-3
    assert np.abs(shifted - wanted).max() < 1e-5


def test_biases_that_others_read_and_weights_in_16_bits_are_not_shifted() -> None:
    body = "a = Gemm(x, w, b)\n c = Gemm(a, v, b)\n y = Mul(c, b)"
    model = tiny("float[N,16] x => float[N,16] y", body, {"w": (16, 16), "v": (16, 16), "b": (16,)})
    shifts = shifts_of(model, [{"x": np.ones((4, 16), np.float32)}])
    made = folded(model, ["w"], shifts)
    first, second = (node for node in made.graph if node.op_type == "Gemm")
    assert set(shifts) == {"w", "v"}
    assert first.inputs[2].name == "b"
    assert second.inputs[2].name == "v/b"
    assert made.graph[-1].inputs[1].name == "b"
