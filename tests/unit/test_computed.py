"""Constants that are computed when they are looked at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.calibration.observe import heavy, observe
from onnxgrail.graph.io import model_file
from tests.tiny import feed, tiny


def test_what_borrows_a_type_of_an_input_is_kept(tmp_path: Path) -> None:
    """As exporters of torch write biases of zeros: as many as a large weight has rows, of the type of the input."""
    model = tiny(
        "float[N,512] x => float[] y",
        "t = Transpose(w)\ns = Shape<start=0, end=1>(w)\nz = Constant<value_float=0.0>()\nc = CastLike(z, x)\n"
        "e = Expand(c, s)\nh = MatMul(x, t)\na = Add(h, e)\nr = Relu(a)\ny = MatMul(r, u)",
        {"w": (1024, 512), "u": (1024, 4)},
    )
    onnx.save(ir.to_proto(model), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    loaded = model_file.load(tmp_path / "m.onnx")
    assert heavy(loaded, {"t", "s", "c", "e"}) == ["t", "s"]
    facts = observe(loaded, feed(loaded))
    assert np.array_equal(facts.values["e"], np.zeros(1024, np.float32))
    assert facts.values["t"].shape == (512, 1024)


def test_what_is_unknown_is_not_computed(tmp_path: Path) -> None:
    """An input that a node lacks has no name, and what follows from the inputs no value."""
    model = tiny(
        "float[N,512] x => float[N,1024] y", "t = Transpose(w)\nh = MatMul(x, t)\ny = Relu(h)", {"w": (1024, 512)}
    )
    onnx.save(ir.to_proto(model), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    loaded = model_file.load(tmp_path / "m.onnx")
    values = observe(loaded, feed(loaded)).values
    assert values.get("") is None
    assert values.get("h") is None
    assert values["t"].shape == (512, 1024)
