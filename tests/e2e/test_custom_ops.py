"""`--custom-ops`: operators that ONNX Runtime does not have, from a library that the command or the call names."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail.calibration.runtime.session import LIBRARIES
from onnxgrail.errors import UsageError
from tests.command import run

from . import nets

SOURCE = Path(__file__).parents[1] / "custom_op.c"
HINT = "Give the library that has this operator: --custom-ops LIBRARY"
ELF = sys.platform == "linux" and shutil.which("gcc") is not None
built = pytest.mark.skipif(not ELF, reason="no gcc to build a library of custom operators")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model that needs an operator, and data."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    nodes = [nets.node("MatMul", "x a", "b"), nets.node("Relu", "b", "r"), nets.node("MatMul", "r c", "d")]
    nodes += [nets.node("Soft", "d", "e", domain="my.ops"), nets.node("MatMul", "e f", "y")]
    weights = {"a": nets.dense(rng, 6, 16), "c": nets.dense(rng, 16, 8), "f": nets.dense(rng, 8, 4)}
    graph = onnx.helper.make_graph(
        nodes,
        "net",
        [nets.info("x", np.float32, ("N", 6))],
        [nets.info("y", np.float32, ("N", 4))],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("my.ops", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), "m.onnx")
    np.savez("d.npz", x=rng.standard_normal((48, 6)).astype(np.float32))
    yield tmp_path
    assert LIBRARIES.get() == ()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("ops") / "libsoft.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, SOURCE, "-lm"], check=True)
    return target


@pytest.mark.parametrize("command", ["compress", "inspect", "bench"])
def test_an_unknown_operator_names_the_option(here: Path, command: str) -> None:
    told = run(command, "m.onnx", *(["--ratio=0.3"] if command == "compress" else []))
    assert (told.exit_code, told.stderr.splitlines()[-1].count(HINT)) == (1, 1), told.stderr
    assert "my.ops:Soft" in told.stderr


def test_operators_of_others_have_another_hint(here: Path) -> None:
    model = onnx.load("m.onnx")
    model.graph.node[3].domain = model.opset_import[1].domain = "com.microsoft"
    onnx.save(model, "m.onnx")
    told = run("inspect", "m.onnx")
    assert told.exit_code == 1
    assert "a newer release may know its opset" in told.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope.so", "there is no such file"),
        ("m.onnx", "cannot be loaded"),
        ("libs", "it is not a library, but a folder"),
        (".", "but a folder"),
    ],
)
def test_what_is_no_library(here: Path, name: str, said: str) -> None:
    (here / "libs").mkdir()
    told = run("compress", "m.onnx", "o.onnx", "--ratio=0.3", "--custom-ops", name)
    assert told.exit_code == 2
    assert told.stderr.count("\n") == 1
    assert said in told.stderr
    assert "RegisterCustomOps" in told.stderr
    assert not (here / "o.onnx").exists()


@built
def test_every_command_takes_libraries(here: Path, library: Path) -> None:
    words = ("--custom-ops", library)
    shown = run("inspect", "m.onnx", *words)
    assert shown.exit_code == 0
    assert "no rule for my.ops Soft-1" in shown.stdout
    made = run(
        "compress", "m.onnx", "o.onnx", "--data", "d.npz", "--unit-ratio", 0.5, "--save-recipe", "r.yaml", *words
    )
    assert made.exit_code == 0, made.stderr
    assert "libsoft" not in Path("r.yaml").read_text(encoding="utf-8")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    x = np.load("d.npz")["x"]
    (y,) = ort.InferenceSession("o.onnx", options).run(None, {"x": x})
    assert y.shape == (48, 4)
    for command in (("compare", "m.onnx", "o.onnx"), ("bench", "m.onnx", "o.onnx", "--rounds", 1)):
        assert run(*command, "--data", "d.npz", *words).exit_code == 0
        assert run(*command, "--data", "d.npz").exit_code == 1
    again = ("apply", "r.yaml", "m.onnx", "p.onnx", "--data", "d.npz")
    assert HINT in run(*again).stderr  # the recipe does not name it
    assert run(*again, *words).exit_code == 0
    assert Path("p.onnx").read_bytes() == Path("o.onnx").read_bytes()


@built
def test_calls_take_libraries(here: Path, library: Path) -> None:
    found = onnxgrail.inspect("m.onnx", custom_ops=library)
    assert [block["units"] for block in found.blocks] == [16]
    weighed = onnxgrail.compare("m.onnx", "m.onnx", data="d.npz", custom_ops=[library, library])
    assert weighed.outputs[0].cosine == pytest.approx(1)
    with pytest.raises(UsageError, match="--quantize int8 opens the model without"):
        onnxgrail.compress("m.onnx", data="d.npz", quantize="int8", custom_ops=[library], ratio=0.3)
