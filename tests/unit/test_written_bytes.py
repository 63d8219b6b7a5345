"""The size of a file is known to the byte before it is written, whether weights lie in it or beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.writing import written_bytes
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


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("kind", ["stated place", "note", "typed numbers"])
def test_what_tools_store_beside_the_numbers_counts(kind: str, external: bool, tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float16)
    weight = onnx.numpy_helper.from_array(array, "w")
    if kind == "stated place":
        weight.data_location = onnx.TensorProto.DEFAULT  # as the quantizer of ONNX Runtime writes
    elif kind == "note":
        weight.doc_string = "where it came from"
        weight.metadata_props.add(key="key", value="value")
    else:
        weight.ClearField("raw_data")
        weight.int32_data.extend(array.view(np.uint16).ravel().tolist())  # one to three bytes a number
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float16[N,200] x) => (float16[N,200] y) { y = MatMul(x, w) }'
    )
    proto.graph.initializer.append(weight)
    model = load(proto)
    save(model, tmp_path / "a.onnx", apart=external)
    beside = [file.name for file in tmp_path.iterdir() if file.suffix == ".data"]
    assert written_bytes(model, *beside) == sum(file.stat().st_size for file in tmp_path.iterdir())
