"""Modules of users: the file computes what torch does at other sizes, or a line says why not."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import onnxgrail
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.cli import main
from onnxgrail.errors import ModelError, OutputError, UsageError
from onnxgrail.exporting import writers
from tests.written import weights_of

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(HERE / "nets.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(main, ["export", *words])


def test_open_axes_are_open_and_names_stay(folder: Path) -> None:
    result = onnxgrail.export("nets.py:encoder", "e.onnx")
    assert (result.exporter, result.gates_passed, result.opset) == ("dynamo", True, 20)
    assert result.inputs == {"ids": ("batch", "sequence"), "bias": ("batch", "sequence", 16)}
    assert result.outputs == ("hidden", "pooled_0", "pooled_1_0")
    assert {check.what: tuple(check.shapes["ids"]) for check in result.checks} == {
        "the example": (2, 5), "other numbers": (2, 5), "other sizes": (3, 8), "one sample": (1, 5)
    }  # fmt: skip
    with open_session("e.onnx") as session:
        feed = {"ids": np.ones((4, 7), np.int64), "bias": np.zeros((4, 7, 16), np.float32)}
        assert session.run(feed)["hidden"].shape == (4, 7, 16)
    assert "embed.weight" in {t.name for t in onnx.load("e.onnx").graph.initializer}


def test_a_module_from_python_comes_back_as_it_was(folder: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    state = torch.random.get_rng_state()
    result = onnxgrail.export(module, "s.onnx", inputs=torch.ones(1, 4), exporter="torchscript")
    assert result.inputs == {"input": ("batch", 4)}
    assert "forward" not in vars(module)
    assert module.training
    assert module(torch.ones(5, 4)).shape == (5, 3)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_static_opset_type_and_data_beside(folder: Path) -> None:
    words = ("--static", "--opset", "18", "--dtype", "float16", "--save-as-external-data", "--json")
    done = run("nets.py:net", "n.onnx", *words)
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["inputs"] == {"image": [1, 3, 12, 12]}
    assert data["opset"] == 18
    assert len(data["checks"]) == 2, "two feeds of one shape"
    model = onnx.load("n.onnx", load_external_data=False)
    assert {t.data_type for t in model.graph.initializer if len(t.dims) > 1} == {onnx.TensorProto.FLOAT16}
    weights = weights_of(Path("n.onnx"))
    assert weights.stat().st_size > 2 * 16 * 16 * 9
    assert data["bytes"] == Path("n.onnx").stat().st_size + weights.stat().st_size


def test_small_models_are_one_file_and_nothing_else_is_left(folder: Path) -> None:
    before = set(folder.iterdir())
    done = run("nets.py:net", "n.onnx")
    assert done.exit_code == 0, done.stderr
    made = {path.name for path in set(folder.iterdir()) - before} - {"__pycache__"}
    assert made == {"n.onnx"}
    assert "dynamo exporter, opset 20" in done.stdout
    assert "[batch, 3, 12, 12]" in done.stdout


def test_inputs_by_shape_and_axes_by_name(folder: Path) -> None:
    words = ("--input-shapes", "image:2,3,12,12", "--dynamic", "image:0=n,2=height,3=width")
    done = run("nets.py:bare", "n.onnx", *words, "--exporter", "torchscript", "--json")
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["inputs"] == {"image": ["n", 3, "height", "width"]}
    assert {tuple(c["shapes"]["image"]) for c in data["checks"]} == {(2, 3, 12, 12), (5, 3, 15, 15)}
    value = onnxgrail.export("nets.py:VALUE", "v.onnx", input_shapes={"image": (2, 3, 12, 12)}, exporter="torchscript")
    assert value.gates_passed


def test_opsets_of_old_come_from_the_other_exporter(folder: Path) -> None:
    result = onnxgrail.export("nets.py:net", "n.onnx", opset=13)
    assert (result.exporter, result.opset) == ("torchscript", 13)
    assert any("dynamo failed" in note for note in result.notes)
    assert any("records one run" in note for note in result.notes)


def test_axes_that_torch_cannot_open_are_fixed_and_told(folder: Path) -> None:
    result = onnxgrail.export("nets.py:pairs", "p.onnx")
    assert result.inputs == {"x": (2, 4)}
    assert "fixed sizes: batch 2 (the model takes no other)" in result.notes


def test_tensors_in_lists_and_mappings_are_inputs(folder: Path) -> None:
    result = onnxgrail.export("nets.py:packed", "p.onnx")
    assert result.inputs == {
        name: ("batch", size) for name, size in (("batch_x", 6), ("batch_y", 5), ("more_0", 6), ("more_1", 6))
    }
    assert result.outputs == ("scores", "rest_0")
    assert {tuple(c.shapes["more_1"]) for c in result.checks} == {(2, 6), (3, 6), (1, 6)}
    assert result.gates_passed


def test_axes_that_take_only_even_sizes_are_tried_at_twice_the_size(folder: Path) -> None:
    result = onnxgrail.export("nets.py:halves", "h.onnx", dynamic={"image": {0: "n", 2: "height", 3: "width"}})
    assert result.gates_passed
    assert result.checks[-1].shapes == {"image": (4, 3, 32, 32)}
    assert not [note for note in result.notes if "one size only" in note]


def test_an_axis_that_was_tried_at_one_size_is_named(folder: Path) -> None:
    result = onnxgrail.export("nets.py:twelve", "t.onnx", dynamic={"image": {2: "width"}}, exporter="torchscript")
    assert result.notes[-1] == "compared at one size only: width (torch ran no other that was tried)"


def test_what_torch_compiles_keeps_its_names(folder: Path) -> None:
    result = onnxgrail.export("nets.py:compiled", "c.onnx")
    assert list(result.inputs) == ["image"]
    assert "first.weight" in {tensor.name for tensor in onnx.load("c.onnx").graph.initializer}


def test_bfloat16_becomes_float32_unless_asked_for(folder: Path) -> None:
    module = torch.nn.Linear(4, 8).to(torch.bfloat16)
    example = torch.ones(2, 4, dtype=torch.bfloat16)
    kept = onnxgrail.export(module, "b.onnx", inputs=example, dtype="bfloat16", exporter="dynamo")
    assert kept.gates_passed
    assert onnx.load("b.onnx").graph.initializer[0].data_type == onnx.TensorProto.BFLOAT16
    assert module.weight.dtype == torch.bfloat16
    wide = onnxgrail.export(module, "f.onnx", inputs=example, exporter="torchscript")
    assert any("bfloat16 became float32" in note for note in wide.notes)
    assert onnx.load("f.onnx").graph.initializer[0].data_type == onnx.TensorProto.FLOAT
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_weights_too_large_for_one_message_go_beside(
    exporter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxgrail.graph.io.model_file.LIMIT", 1000)
    result = onnxgrail.export("nets.py:net", "n.onnx", exporter=exporter)
    assert result.gates_passed
    assert weights_of(Path("n.onnx")).stat().st_size > 2 * 16 * 16 * 9


# ------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("name", ["branch", "loose", "noise"])
def test_a_file_that_differs_is_kept_and_the_gate_says_so(name: str, folder: Path) -> None:
    done = run(f"nets.py:{name}", "g.onnx")
    assert done.exit_code == 3, done.stderr
    assert Path("g.onnx").exists()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: gate failed: ")
    assert last.endswith("g.onnx was written")


def test_tolerance_is_the_gate(folder: Path) -> None:
    assert run("nets.py:net", "n.onnx", "--tolerance", "0", "--exporter", "torchscript").exit_code == 3
    assert run("nets.py:noise", "r.onnx", "--tolerance", "9", "--exporter", "torchscript").exit_code == 0
    assert run("nets.py:noise", "s.onnx", "--no-check", "--exporter", "torchscript").exit_code == 0


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nets.py:boom", "nets.py:boom raised ValueError: not today"),
        ("nets.py:nowhere", "defines no 'nowhere'"),
        ("none.py:net", "no file 'none.py'"),
        ("nets.py:number", "gave a int, expected a torch module"),
        ("nets.py:bare", "inputs are not known"),
        ("nets.py:wrong", "forward takes image, and not 'picture'"),
        ("nets.py:small", "raised RuntimeError on image[2, 4, 12, 12]"),
        ("nets.py:held", "cannot be exported: "),
        ("nets.py:script", "is TorchScript already. Export the module that it was made from"),
        ("transformers:./nowhere", "no folder './nowhere'"),
    ],
)
def test_errors_are_one_line(spec: str, words: str, folder: Path) -> None:
    if spec.startswith("transformers"):
        pytest.importorskip("transformers")
    done = run(spec, "x.onnx")
    assert done.exit_code == 1, done.stdout
    line = done.stderr.splitlines()[-1]
    assert line.startswith("Error: ")
    assert words in line
    assert not list(folder.glob("*.onnx*"))


@pytest.mark.parametrize("spec", ["model.onnx", "nets.py", "resnet18", "timm:"])
def test_texts_that_name_nothing_are_wrong_usage(spec: str, folder: Path) -> None:
    done = run(spec, "x.onnx")
    assert done.exit_code == 2
    assert "Give file.py:function" in done.stderr


def test_outputs_are_not_replaced(folder: Path) -> None:
    Path("x.onnx").write_text("mine")
    with pytest.raises(OutputError, match="--force"):
        onnxgrail.export("nets.py:net", "x.onnx")
    with pytest.raises(OutputError, match="is the input"):
        onnxgrail.export("nets.py:net", "nets.py", force=True)
    assert Path("x.onnx").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"exporter": "tf"}, "exporter"),
        ({"attention": "flash"}, "attention"),
        ({"static": True, "dynamic": {"image": {0: "n"}}}, "contradict"),
        ({"dynamic": {"x": {0: "n"}}}, "no input 'x'"),
        ({"dynamic": {"image": {4: "n"}}}, "axes 0 to 3"),
        ({"random_weights": True}, "models of hubs"),
        ({"opset": 8}, "opset 8 is not between 9 and"),
        ({"opset": 99}, "opset 99 is not between 9 and"),
        ({"inputs": torch.ones(2, 3, 12, 12)}, "for a module that is given"),
        ({"input_shapes": {"image": (2, 3, 12, 12)}}, "has example inputs, so none are made"),
    ],
)
def test_wrong_usage(settings: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=words):
        onnxgrail.export("nets.py:net", "x.onnx", **settings)


def test_only_the_asked_exporter_is_tried(folder: Path) -> None:
    with pytest.raises(ModelError, match="GuardOnDataDependent"):
        onnxgrail.export("nets.py:branch", "x.onnx", exporter="dynamo")


def test_a_full_disk_is_no_fault_of_the_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def full(*_: Any) -> None:
        tried.append(1)
        raise RuntimeError("the exporter failed") from OSError(errno.ENOSPC, "No space left on device")

    for name in writers.EXPORTERS:
        monkeypatch.setitem(writers._WRITERS, name, full)
    with pytest.raises(OutputError, match=r"cannot write m.onnx: No space left on device. Choose another"):
        onnxgrail.export(torch.nn.Linear(3, 2), tmp_path / "m.onnx", inputs=(torch.ones(2, 3),))
    assert (tried, list(tmp_path.iterdir())) == ([1], [])
