"""Weights that are also graph inputs stop being inputs, unless they are asked to stay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepare import prepare
from onnxgrail.cli import main
from onnxgrail.core import Array, Recipe
from onnxgrail.graph.flatten.direct import unlist
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.job import Job
from tests.tiny import batch_norm, feed, ints, tiny

QUICK: dict[str, Any] = {"unit_ratio": 0.5, "round_to": 1, "compensate": "none", "samples": 4}
NET = (
    "a = Conv<pads=[1,1,1,1]>(x, w, b)\nn = BatchNormalization(a, s, t, u, v)\nr = Relu(n)\n"
    "m = Reshape(k, shape)\nf = Reshape(r, flat)\ny = MatMul(f, m)"
)


def net(ir_version: int, listed: str = "all") -> onnx.ModelProto:
    """Convolution, normalization and a matrix that is stored in another shape, as CNTK writes it; or few inputs."""
    shapes: dict[str, tuple[int, ...] | Array] = {"shape": ints(1024, 5), "flat": ints(0, -1)}
    weights = {"w": (16, 3, 3, 3), "b": (16,), "k": (16, 64, 5), **shapes, **batch_norm("stuv", 16)}
    proto = ir.to_proto(tiny("float[N,3,8,8] x => float[] y", NET, weights, opset=9, ir_version=max(ir_version, 4)))
    names = [t.name for t in proto.graph.initializer] if listed == "all" else [listed]
    for tensor in proto.graph.initializer:
        if tensor.name in names:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    proto.ir_version = ir_version
    return proto


def stored(path: Path) -> tuple[onnx.ModelProto, list[str]]:
    """A written model, and its inputs."""
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    return proto, [value.name for value in proto.graph.input]


@pytest.mark.parametrize("ir_version", [3, 4, 7])
def test_they_stop_being_inputs(ir_version: int, tmp_path: Path) -> None:
    source, output = tmp_path / "net.onnx", tmp_path / "small.onnx"
    onnx.save(net(ir_version), source)
    result = onnxgrail.compress(source, output, **QUICK)
    proto, inputs = stored(output)
    assert inputs == ["x"]
    assert proto.ir_version == max(ir_version, 4)
    assert output.stat().st_size < source.stat().st_size
    (note,) = [n for n in result.report.data["notes"] if "graph input" in n]
    assert "9 weights are also graph inputs" in note
    assert "--keep-initializer-inputs" in note
    assert ("folding" in note) == (ir_version > 3)
    assert fused(output) == {"Conv", "Reshape", "MatMul"}
    assert onnxgrail.compare(source, output).outputs[0].name == "y"
    assert len(onnxgrail.bench(source, output, seconds=0.01, rounds=1).rows) == 2


def fused(path: Path) -> set[str]:
    """Types of the nodes that run, without those of layouts and activations."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".run.onnx"))
    options.log_severity_level = 4
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = {n.op_type for n in onnx.load(path.with_suffix(".run.onnx")).graph.node}
    return {kind.removeprefix("Fused").removesuffix("NhwcConv") for kind in kinds} - {"ReorderInput", "ReorderOutput"}


@pytest.mark.parametrize("ir_version", [3, 4])
def test_they_stay_when_asked_to(ir_version: int, tmp_path: Path) -> None:
    source, output = tmp_path / "net.onnx", tmp_path / "small.onnx"
    onnx.save(net(ir_version), source)
    words = ["compress", str(source), str(output), "--unit-ratio", "0.5", "--round-to", "1", "--compensate", "none"]
    done = CliRunner().invoke(main, [*words, "--keep-initializer-inputs"])
    assert done.exit_code == 0, done.output
    proto, inputs = stored(output)
    assert inputs == ["x", "w", "b", "shape", "flat", "s", "t", "u", "v"]  # k is replaced by a narrower matrix
    assert proto.ir_version == ir_version
    sizes = {t.name: list(t.dims) for t in proto.graph.initializer}
    declared = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    assert sizes == {name: dims for name, dims in declared.items() if name != "x"}
    assert sizes["w"] == [8, 3, 3, 3]
    assert output.stat().st_size < 0.6 * source.stat().st_size
    assert ("still graph inputs" in done.output) == (ir_version > 3)


def test_an_input_with_a_default_is_no_weight(tmp_path: Path) -> None:
    """One constant of many that is an input was chosen by somebody: it stays one, with its shape."""
    source, output = tmp_path / "net.onnx", tmp_path / "small.onnx"
    onnx.save(net(7, listed="b"), source)
    with pytest.raises(onnxgrail.NothingToCompressError, match="b is an input of the model, with a default value"):
        onnxgrail.compress(source, output, **QUICK)
    assert not onnxgrail.inspect(source).notes
    onnx.save(net(7, listed="shape"), source)
    with pytest.raises(onnxgrail.NothingToCompressError, match="shape is an input of the model, with a default value"):
        onnxgrail.compress(source, output, **QUICK)


@pytest.mark.parametrize(("listed", "removed"), [(["b1", "b2"], ("b1", "b2")), (["b2"], ())])
def test_inputs_that_are_all_biases_are_weights(listed: list[str], removed: tuple[str, ...]) -> None:
    """As Brevitas writes them, whose other weights are integers."""
    body = "a = Gemm(x, w1, b1)\nh = Mul(a, s)\ny = Gemm(h, w2, b2)"
    model = tiny("float[N,6] x => float[N,4] y", body, {"w1": (6, 9), "b1": (9,), "s": (9,), "w2": (9, 4), "b2": (4,)})
    model.graph.inputs.extend(model.graph.initializers[name] for name in listed)
    assert unlist(model).names == removed


def test_inspect_says_so(tmp_path: Path) -> None:
    source = tmp_path / "net.onnx"
    onnx.save(net(4), source)
    done = CliRunner().invoke(main, ["inspect", str(source)])
    assert "Note: 9 weights are also graph inputs, which keeps ONNX Runtime from folding them" in done.output
    found = onnxgrail.inspect(source)
    assert len(found.notes) == 1
    assert found.notes[0] in re.sub(r"</?span[^>]*>", "", found.to_html())


def test_speed_is_compared_with_the_model_as_it_was_given() -> None:
    for ir_version in (3, 4):
        model = net(ir_version)
        prepared = prepare(model, None, Job(recipe=Recipe(samples=2, batch_size=2)))
        assert [v.name for v in prepared.model.graph.inputs] == ["x"]
        assert {v.name for v in prepared.given.graph.inputs} == {v.name for v in model.graph.input}
        assert prepared.given.ir_version == ir_version
        survey = trace(prepared.model, observe(prepared.model, feed(prepared.model)))
        assert [np.prod(block.units) for block in survey.blocks] == [16]
