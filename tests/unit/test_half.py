"""Half precision in which ONNX Runtime dies: the nodes to blame are found and stay in float32."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.quantize import half, quantise
from onnxgrail.calibration.runtime import child
from onnxgrail.calibration.runtime.trial import Trial, try_out
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.model_file import load, save
from tests.command import run
from tests.oracle import run as run_model
from tests.tiny import tiny

CRASHES = """
    s = Relu(h)
    sh = Shape(s)
    z = Reshape(s, sh)
    t = Transpose<perm=[1,0,2]>(z)
    m = MatMul(t, w)
    r = Relu(m)
    y = MatMul(r, v)
"""  # in half precision, release 1.31 of ONNX Runtime dies of SIGSEGV when it opens this with default optimization


def written(folder, body=CRASHES, signature="float[N,8,11] h => float[8,N,5] y", **weights):
    path = folder / "m.onnx"
    save(tiny(signature, body, weights or {"w": (11, 16), "v": (16, 5)}), path)
    return path


def named(*wanted):
    """Replace the trial of a model, which dies unless these nodes stay in float32."""
    return lambda blocked: Trial() if set(wanted) <= set(blocked) else Trial("ONNX Runtime dies of SIGSEGV", died=True)


def test_a_file_that_kills_the_runtime_is_not_written(tmp_path):
    source, target = written(tmp_path), tmp_path / "o.onnx"
    result = onnxgrail.compress(source, target, quantize="fp16", check=False, ratio=0.5, round_to=1)
    entry = result.report.data["quantization"]
    assert try_out(target, [np.ones((2, 8, 11), np.float32)]) == Trial()
    assert {t.data_type for t in onnx.load(target).graph.initializer} == {onnx.TensorProto.FLOAT16}
    assert bool(entry["kept_float"]) == ("dies of" in entry["kept_float_reason"])  # newer releases may run it


def test_the_table_names_what_stays_in_float(tmp_path, monkeypatch):
    monkeypatch.setattr(half, "culprits", lambda source, make: ("Transpose_3",))
    answers = iter([Trial("ONNX Runtime dies of SIGSEGV", died=True), Trial()])
    monkeypatch.setattr("onnxgrail.calibration.quantize.try_out", lambda *args, **options: next(answers))
    result = run("compress", written(tmp_path), tmp_path / "o.onnx", "--ratio=0.3", "--quantize", "fp16", "--no-check")
    assert "kept in float: 1 node (in half precision ONNX Runtime dies of SIGSEGV)" in result.stdout
    nodes = {node.name: node for node in onnx.load(tmp_path / "o.onnx").graph.node}
    assert nodes["Transpose_3"].input[0].endswith("_cast_to_fp32")


@pytest.mark.parametrize("kind", ["fp16", "int8-dynamic"])
def test_without_a_remedy_it_is_an_error(kind, tmp_path, monkeypatch):
    dies = Trial("ONNX Runtime dies of SIGSEGV", died=True)
    monkeypatch.setattr("onnxgrail.calibration.quantize.try_out", lambda *args, **options: dies)
    with pytest.raises(ModelError, match=f"--quantize {kind}: ONNX Runtime dies of SIGSEGV when it opens"):
        quantise(load(written(tmp_path)), kind)


@pytest.mark.parametrize(
    "wanted", [("Transpose_3",), ("MatMul_4", "MatMul_6"), ("Relu_0", "MatMul_6"), ("Shape_1", "Relu_5", "MatMul_4")]
)
def test_the_search_finds_the_nodes_to_blame(wanted, tmp_path):
    assert sorted(half.culprits(written(tmp_path), named(*wanted))) == sorted(wanted)


def test_the_search_ends_where_nothing_helps(tmp_path):
    tried = []
    assert half.culprits(written(tmp_path), lambda names: tried.append(names) or Trial("it fails")) == ()
    assert len(tried) == 1


def test_the_search_is_bounded_and_what_it_returns_was_tried(tmp_path):
    wanted, tried = {f"n{i}" for i in range(0, 200, 2)}, []
    names = [f"n{i}" for i in range(200)]

    def works(some):
        tried.append(tuple(some))
        return len(tried) <= 20 and wanted <= set(some)

    found = half.fewest(names, works)
    assert wanted <= set(found)
    few = half.fewest([f"n{i}" for i in range(4096)], lambda some: "n77" in some)
    assert few == ["n77"]


def test_one_node_of_many_takes_few_trials():
    tried = []
    half.fewest([f"n{i}" for i in range(4096)], lambda some: tried.append(some) or "n77" in some)
    assert len(tried) <= 2 * math.log2(4096)


def test_nodes_that_read_one_tensor_in_float_share_a_cast(tmp_path):
    """The tool writes a cast per reader, all with the same output, which is no valid graph."""
    body = "a = MatMul(h, w)\nb = Max(a, lo)\nc = Min(a, lo)\nd = Add(b, c)\ny = MatMul(d, v)"
    source = written(tmp_path, body, "float[N,4] h => float[N,3] y", w=(4, 8), v=(8, 3), lo=(8,))
    half.convert(source, tmp_path / "o.onnx")
    assert try_out(tmp_path / "o.onnx", [np.ones((2, 4), np.float32)]) == Trial()


def test_weights_of_two_branches_may_have_one_name(tmp_path):
    """The tool takes them for one weight, and ends with an assertion."""
    bodies = [f"{name} () => (float[1,3] {name}) <float[4,3] w = {{{', '.join('1' * 12)}}}> {{ {name} = MatMul(x, w) }}"
              for name in ("a", "b")]  # fmt: skip
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (bool c, float[1,4] x) => (float[1,3] y) {{
    y = If (c) <then_branch = {bodies[0]}, else_branch = {bodies[1]}> }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    half.convert(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert try_out(tmp_path / "o.onnx", [np.array(True), np.ones((1, 4), np.float32)]) == Trial()


# ---------------------------------------------------------------------------------------------------- the child process


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Trial("ONNX Runtime dies of SIGSEGV", died=True)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Trial()),  # as a system does that lacks memory
        ("print('Node (a): no kernel'); raise SystemExit(7)", Trial("ONNX Runtime fails on it: Node (a): no kernel")),
        ("import no_such_module", Trial()),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_how_the_child_process_ends_is_judged(code, expected, tmp_path, monkeypatch):
    (tmp_path / "stub.py").write_text(code)
    monkeypatch.setattr(child, "__file__", str(tmp_path / "stub.py"))
    assert try_out(tmp_path / "m.onnx") == expected


def test_the_child_process_reads_what_it_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise SystemExit(0)")  # a file of the current folder is no module of ours
    written(tmp_path)
    assert try_out(Path("m.onnx"), [np.ones((2, 8, 11), np.float32)]) == Trial()
    assert "Got invalid dimensions" in try_out(Path("m.onnx"), [np.ones((2, 8, 12), np.float32)]).problem
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    assert "Protobuf parsing failed" in try_out(Path("m.onnx")).problem


@pytest.mark.parametrize("amount", [{"ratio": 0}, {"max_loss": 0.05, "minimize": "params"}])
def test_numbers_that_are_too_large_stay_in_float(tmp_path, amount):
    body = "c = Sub(x, mean)\nd = Div(c, spread)\nh = MatMul(d, w)\nr = Relu(h)\ny = MatMul(r, v)"
    model = tiny("float[N,4] x => float[N,3] y", body, {"w": (4, 32), "v": (32, 3), "mean": (4,), "spread": (4,)})
    for name, number in (("mean", 1e6), ("spread", 2e5)):
        model.graph.initializers[name].const_value = ir.tensor(np.full(4, number, np.float32))
    x = (1e6 + 2e5 * np.random.default_rng(0).standard_normal((64, 4))).astype(np.float32)
    result = onnxgrail.compress(model, data={"x": x}, quantize="fp16", **amount)
    entry = result.report.data["quantization"]
    assert entry["kept_float_reason"] == "its numbers are too large for half precision"
    assert len(entry["kept_float"]) == 2
    search = result.report.data["allocation"]["search"]
    assert not search or set(search["spared"].values()) == {entry["kept_float_reason"]}
    types = {name: value.dtype for name, value in result.model.graph.initializers.items()}
    assert types["mean"] == ir.DataType.FLOAT
    assert types["w"] == ir.DataType.FLOAT16
    wanted, got = run_model(model, {"x": x})["y"], run_model(result.model, {"x": x})["y"]
    assert np.square(wanted - got).sum() < 0.2 * np.square(wanted).sum()


def test_a_model_that_gives_no_numbers_in_half_precision_is_refused():
    body = "c = Concat<axis=1>(x, x)\nh = MatMul(c, w)\nr = Relu(h)\nz = Sub(r, r)\ny = MatMul(z, v)"
    model = tiny("float[N,4] x => float[N,3] y", body, {"w": (8, 32), "v": (32, 3)})
    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    choices = {"data": {"x": x}, "held_out": {"x": 1e6 * x}, "quantize": "fp16"}  # calibration does not show it
    with pytest.raises(onnxgrail.NothingToCompressError, match="NaN or infinite where those of the original"):
        onnxgrail.compress(model, **choices, ratio=0)
    with pytest.raises(onnxgrail.NothingToCompressError, match="gives numbers that are NaN or infinite") as error:
        onnxgrail.compress(model, **choices, minimize="params")
    assert error.value.hint.startswith("Give another --quantize")
