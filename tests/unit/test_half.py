"""Half precision in which ONNX Runtime dies: the nodes to blame are found and stay in float32."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.calibration.quantize import half, quantise
from onnxgrail.calibration.runtime import child
from onnxgrail.calibration.runtime.trial import Trial, try_out
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.model_file import load, save
from tests.command import run
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
