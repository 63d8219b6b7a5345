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
from onnxgrail.errors import ModelError
from onnxgrail.graph.io import interop
from tests.written import weights_of

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
    words: dict[str, Any] = {"unit_ratio": 0.5, "data": nets.vectors(), "save_as_external_data": False}
    result = onnxgrail.compress(given(form, tmp_path), tmp_path / "o.onnx", **words)
    wanted = run((tmp_path / "o.onnx").read_bytes())
    assert not result.proto().graph.initializer[0].external_data
    np.testing.assert_array_equal(run(result.to_bytes()), wanted)
    np.testing.assert_array_equal(run(result.proto().SerializeToString()), wanted)
    graph = result.graphsurgeon()
    assert isinstance(graph, gs.Graph)
    np.testing.assert_array_equal(run(gs.export_onnx(graph).SerializeToString()), wanted)
    assert onnx.load_from_string(result.to_bytes()) == onnx.load(tmp_path / "o.onnx")
    again = onnxgrail.compress(graph, unit_ratio=0, data=nets.vectors())
    np.testing.assert_array_equal(run(again.to_bytes()), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_compared_and_timed(form: str, tmp_path: Path) -> None:
    dense = given(form, tmp_path)
    result = onnxgrail.compress(dense, tmp_path / "o.onnx", unit_ratio=0.5, data=nets.vectors())
    files = onnxgrail.compare(tmp_path / "m.onnx", tmp_path / "o.onnx", data=nets.vectors())
    assert 0.01 < files.outputs[0].nmse < 0.9  # type: ignore[operator]
    for slim in (result.model, result.to_bytes(), result.proto(), result.graphsurgeon()):
        objects = onnxgrail.compare(dense, slim, data=nets.vectors())
        assert objects.outputs == files.outputs
        assert (objects.b.path, objects.b.params, objects.b.macs) == ("B", files.b.params, files.b.macs)
        assert abs(objects.b.bytes - files.b.bytes) < 2000  # a graph of GraphSurgeon has no metadata
    rows = onnxgrail.bench(dense, result.model, rounds=3).rows
    lies = str(tmp_path / "m.onnx") if form in ("path", "text") else "model 1"
    assert [row.path for row in rows] == [lies, "model 2"]
    assert rows[1].bytes < rows[0].bytes


def test_objects_that_do_not_fit_are_named() -> None:
    with pytest.raises(ModelError, match="model 2 takes"):
        onnxgrail.bench(nets.mlp(), nets.transformer())


def test_weights_beside_the_file(tmp_path: Path) -> None:
    """A model whose weights lie beside it, opened with each library that leaves them there."""
    given("path", tmp_path)
    for source in (tmp_path / "m.onnx", ir.load(tmp_path / "m.onnx"), gs.import_onnx(onnx.load(tmp_path / "m.onnx"))):
        target = tmp_path / "o.onnx"
        result = onnxgrail.compress(
            source, target, unit_ratio=0.5, data=nets.vectors(), save_as_external_data=True, force=True
        )
        assert weights_of(target).stat().st_size > 0
        session = onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(["y"], nets.vectors(seed=4))[0], run(result.to_bytes()))
    apart = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    with pytest.raises(ModelError, match="Give the path of the model file"):
        onnxgrail.compress(apart, unit_ratio=0.5, data=nets.vectors())


def test_what_no_message_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    result = onnxgrail.compress(nets.mlp(), unit_ratio=0.5, data=nets.vectors())
    monkeypatch.setattr(interop, "LIMIT", 100)
    with pytest.raises(ModelError, match="over 2 GiB"):
        result.proto()
