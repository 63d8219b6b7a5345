"""The size of a file is known to the byte before it is written, whether weights lie in it or beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxgrail
from tests.tiny import tiny

WIDTHS = (16, 127, 128, 129, 200, 700)  # weights of 64 kB and more are counted without being read


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_dry_run_tells_the_bytes_of_the_file(width: int, external: bool, tmp_path: Path) -> None:
    model = tiny(
        "float[N,64] x => float[] y", "h = Gemm(x, a, b)\nr = Relu(h)\ny = MatMul(r, c)", {
            "a": (64, width), "b": np.zeros(width, np.float32), "c": (width, 130),
        },
    )  # fmt: skip
    choices = {"unit_ratio": 0.1, "round_to": 1, "save_as_external_data": external}
    told = onnxgrail.compress(model, tmp_path / "a.onnx", dry_run=True, **choices).report.data["model"]["bytes_after"]
    onnxgrail.compress(model, tmp_path / "a.onnx", **choices)
    assert told == sum(file.stat().st_size for file in tmp_path.iterdir())
