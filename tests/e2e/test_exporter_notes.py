"""Notes of exporters go first if the size of the file decides: they cost bytes and say nothing to a runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.graph.io.serial import to_file
from tests.tiny import tiny

TRACE, SCOPES = "pkg.torch.onnx.stack_trace", "pkg.torch.onnx.name_scopes"
INT8 = {"c": np.arange(-48, 48, dtype=np.int8).reshape(8, 12), "s": np.float32(0.05), "z": np.int8(0)}


def noted(body: str, weights: dict[str, Any], length: int) -> onnx.ModelProto:
    """A model whose nodes tell where they come from, as the exporter of torch writes them."""
    model = tiny("float[N,8] x => float[] y", body, weights)
    for number, node in enumerate(model.graph):
        node.metadata_props.update({TRACE: "line\n" * length, "namespace": "m", "mine": "stays"})
        node.metadata_props[SCOPES] = f"['', 'net', 'net.part{number}', '{node.op_type}']"
        node.doc_string = "made by"
        node.outputs[0].metadata_props["pkg.torch.onnx.original_node_name"] = "n"
    proto = to_file(model)
    proto.metadata_props.add(key="labels", value="a,b")
    return proto


def plain() -> onnx.ModelProto:
    return noted("h = Gemm(x, a, b)\nr = Relu(h)\ny = MatMul(r, c)", {"a": (8, 64), "b": (64,), "c": (64, 8)}, 3000)


@pytest.mark.parametrize("options", [{}, {"only_widths": True}, {"only_bits": True}])
def test_a_size_is_met_without_touching_a_weight(options: dict[str, bool], tmp_path: Path) -> None:
    given = tmp_path / "noted.onnx"
    onnx.save(plain(), given)
    result = onnxgrail.compress(given, tmp_path / "small.onnx", target_size="60%", **options)
    written, before = onnx.load(tmp_path / "small.onnx"), onnx.load(given)
    assert (tmp_path / "small.onnx").stat().st_size <= 0.6 * given.stat().st_size
    assert [w.raw_data for w in written.graph.initializer] == [w.raw_data for w in before.graph.initializer]
    keys = [{entry.key for entry in node.metadata_props} for node in written.graph.node]
    assert keys == [{SCOPES, "mine"}] * 3
    assert not any(node.doc_string for node in written.graph.node)
    assert {entry.key for entry in written.metadata_props} >= {"labels", "onnxgrail.recipe"}
    assert any("notes of its exporter" in note for note in result.report.data["notes"])


def test_what_goes_beyond_the_notes_is_less(tmp_path: Path) -> None:
    given = tmp_path / "noted.onnx"
    onnx.save(plain(), given)
    share = 0.8 * (given.stat().st_size - 3 * 15000) / given.stat().st_size
    for limit in ("40%", f"{100 * share:.2f}%"):
        onnxgrail.compress(given, tmp_path / "small.onnx", target_size=limit, force=True)
        size = (tmp_path / "small.onnx").stat().st_size
        assert size <= float(limit[:-1]) / 100 * given.stat().st_size


def test_a_model_in_which_nothing_can_lose_anything_sheds_its_notes(tmp_path: Path) -> None:
    given = tmp_path / "noted.onnx"
    onnx.save(noted("w = DequantizeLinear(c, s, z)\ny = MatMul(x, w)", INT8, 3000), given)
    onnxgrail.compress(given, tmp_path / "small.onnx", target_size="50%")
    assert (tmp_path / "small.onnx").stat().st_size <= 0.5 * given.stat().st_size
    with pytest.raises(onnxgrail.NothingToCompressError):
        onnxgrail.compress(given, tmp_path / "smaller.onnx", target_size="1%")


def test_without_a_size_the_notes_stay(tmp_path: Path) -> None:
    onnxgrail.compress(plain(), tmp_path / "small.onnx", ratio=0.3)
    written = onnx.load(tmp_path / "small.onnx")
    assert any(TRACE in {entry.key for entry in node.metadata_props} for node in written.graph.node)


def test_blocks_of_the_result_have_their_names(tmp_path: Path) -> None:
    model = plain()
    onnxgrail.compress(model, tmp_path / "small.onnx", target_size="60%")
    named = [[b["name"] for b in onnxgrail.inspect(m).blocks] for m in (model, tmp_path / "small.onnx")]
    assert named[0] == named[1] != []
