"""Models that never come to an end, do not run, ask for too much, or have names that move the cursor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import onnxgrail
from onnxgrail.cli import main
from onnxgrail.cli.parts.render import printable
from onnxgrail.errors import ModelError, UsageError

from . import nets


def endless() -> onnx.ModelProto:
    """A loop of more rounds than there is time for, in front of two layers."""
    model = nets.mlp()
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["more"]), helper.make_node("Neg", ["e"], ["g"])],
        "turn",
        [nets.info("i", np.int64, ()), nets.info("on", np.bool_, ()), nets.info("e", np.float32, ("batch", 12))],
        [nets.info("more", np.bool_, ()), nets.info("g", np.float32, ("batch", 12))],
    )
    model.graph.initializer.append(helper.make_tensor("times", TensorProto.INT64, [], [2**62]))
    model.graph.initializer.append(helper.make_tensor("true", TensorProto.BOOL, [], [1]))
    model.graph.node.insert(0, helper.make_node("Loop", ["times", "true", "x"], ["turned"], body=body))
    model.graph.node[1].input[0] = "turned"
    return model


def test_a_run_can_be_given_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXGRAIL_RUN_SECONDS", "0.3")
    with pytest.raises(ModelError, match=r"longer than the 0.3 seconds that ONNXGRAIL_RUN_SECONDS allows"):
        onnxgrail.inspect(endless())
    onnxgrail.inspect(nets.mlp())
    monkeypatch.setenv("ONNXGRAIL_RUN_SECONDS", "-1")
    with pytest.raises(UsageError, match="ONNXGRAIL_RUN_SECONDS=-1"):
        onnxgrail.inspect(nets.mlp())


def test_a_model_that_loads_but_does_not_run() -> None:
    model = nets.mlp()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 5]), "wrong"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 12]), "right"))
    model.graph.node.insert(0, helper.make_node("Reshape", ["x", "wrong"], ["odd"]))
    model.graph.node.insert(1, helper.make_node("Reshape", ["odd", "right"], ["back"]))
    model.graph.node[2].input[0] = "back"
    with pytest.raises(ModelError, match=r"ONNX Runtime failed on the feed x\[8, 12\].*must run before"):
        onnxgrail.compress(model, data=nets.vectors(), unit_ratio=0.3)


def test_a_model_that_runs_on_one_sample_says_so() -> None:
    model = nets.mlp()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 12]), "one"))
    model.graph.node.insert(0, helper.make_node("Reshape", ["x", "one"], ["back"]))
    model.graph.node[1].input[0] = "back"
    with pytest.raises(ModelError, match="failed on the feed") as caught:
        onnxgrail.compress(model, data=nets.vectors(), unit_ratio=0.3)
    assert caught.value.hint == "It runs on one sample at a time: give --batch-size 1"
    report = onnxgrail.compress(model, data=nets.vectors(), unit_ratio=0.3, batch_size=1).report.data
    assert report["model"]["params_after"] < report["model"]["params_before"]


def test_sizes_that_a_file_asks_for_are_not_believed() -> None:
    model = nets.mlp()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**40
    with pytest.raises(onnxgrail.DataError, match=r"would take 4.92e\+04 GiB"):
        onnxgrail.inspect(model)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1  # how some writers say that it is open
    assert onnxgrail.inspect(model).blocks


def test_functions_that_grow_without_bound() -> None:
    model = nets.mlp()
    deep = helper.make_opsetid("deep", 1)
    for k in range(30):
        calls = [helper.make_node(f"f{k + 1}", [a], [b], domain="deep") for a, b in ("ab", "bc")]
        calls = calls if k < 29 else [helper.make_node("Relu", ["a"], ["c"])]
        model.functions.append(helper.make_function("deep", f"f{k}", ["a"], ["c"], calls, [*model.opset_import, deep]))
    model.opset_import.append(deep)
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(helper.make_node("f0", ["before"], ["y"], domain="deep"))
    with pytest.raises(ModelError, match=r"its functions have 5\.37e\+08 nodes"):
        onnxgrail.inspect(model)
    del model.graph.node[-1]
    model.graph.node[-1].output[0] = "y"
    assert onnxgrail.inspect(model).blocks, "nobody calls them, so nothing grows"


def test_names_do_not_move_the_cursor(tmp_path: Path) -> None:
    assert printable("a\x1b[2J\u202eb\né") == r"a\x1b[2J\u202eb\né"
    model = nets.mlp()
    for node in model.graph.node:
        node.output[:] = ["\x1b[2J" if name == "y" else name for name in node.output]
    model.graph.output[0].name = "\x1b[2J"
    onnx.save(model, tmp_path / "m.onnx")
    result = CliRunner().invoke(main, ["compress", str(tmp_path / "m.onnx"), "--unit-ratio=0.3", "--samples", "4"])
    assert result.exit_code == 0, result.output
    assert "output \\x1b[2J on" in result.stdout
    assert "\x1b" not in result.output
