"""Every form of a model in, every form out, and all of them compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import onnxruntime
import pytest

import onnxgrail
from onnxgrail import interop
from onnxgrail.errors import ModelError

from . import nets

FORMS = ("path", "text", "bytes", "proto", "ir", "gs")


def given(form: str, folder: Path) -> Any:
    proto = nets.mlp()
    onnx.save(proto, folder / "m.onnx", save_as_external_data=form == "path", size_threshold=0, location="m.data")
    return {
        "path": lambda: folder / "m.onnx",
        "text": lambda: str(folder / "m.onnx"),
        "bytes": proto.SerializeToString,
        "proto": lambda: proto,
        "ir": lambda: ir.from_proto(proto),
        "gs": lambda: gs.import_onnx(proto),
    }[form]()


def run(data: bytes) -> Any:
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(["y"], nets.vectors(seed=4))[0]


@pytest.mark.parametrize("form", FORMS)
def test_in_and_out(form: str, tmp_path: Path) -> None:
    result = onnxgrail.compress(given(form, tmp_path), tmp_path / "o.onnx", ratio=0.5, data=nets.vectors())
    wanted = run((tmp_path / "o.onnx").read_bytes())
    assert not result.proto().graph.initializer[0].external_data
    np.testing.assert_array_equal(run(result.to_bytes()), wanted)
    np.testing.assert_array_equal(run(result.proto().SerializeToString()), wanted)
    graph = result.graphsurgeon()
    assert isinstance(graph, gs.Graph)
    np.testing.assert_array_equal(run(gs.export_onnx(graph).SerializeToString()), wanted)
    assert onnx.load_from_string(result.to_bytes()) == onnx.load(tmp_path / "o.onnx")
    again = onnxgrail.compress(graph, ratio=0, data=nets.vectors())
    np.testing.assert_array_equal(run(again.to_bytes()), wanted)


def test_what_no_message_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    result = onnxgrail.compress(nets.mlp(), ratio=0.5, data=nets.vectors())
    monkeypatch.setattr(interop, "LIMIT", 100)
    with pytest.raises(ModelError, match="over 2 GiB"):
        result.proto()
