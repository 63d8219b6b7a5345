"""A user's mistake is one line on stderr and an exit code; no traceback, and the folders look as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from onnxgrail.cli import main
from tests.command import said, sized

from . import nets

RUNTIME, USAGE, GATE, NOTHING = 1, 2, 3, 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`m.onnx`, good data for it, and every kind of broken model."""
    tmp_path = tmp_path / "work"  # some mistakes point outside
    tmp_path.mkdir()
    model, feed = nets.mlp(), nets.vectors()
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **feed)
    data = model.SerializeToString()
    (tmp_path / "text.onnx").write_text("this is no model\n" * 50)
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "mobile.ort").write_bytes(b"\x20\0\0\0ORTM" + bytes(range(200)))
    (tmp_path / "pointer.onnx").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for share in (10, 50, 99):
        (tmp_path / f"truncated{share}.onnx").write_bytes(data[: len(data) * share // 100])
    onnx.save(nets.mlp((5, 3)), tmp_path / "single.onnx")
    for version, name in ((99, "opset.onnx"), (0, "no_opset.onnx")):
        other = nets.mlp()
        other.opset_import[0].version = version
        (tmp_path / name).write_bytes(other.SerializeToString())
    bad = nets.mlp()
    array = numpy_helper.to_array(bad.graph.initializer[1]).copy()
    array[0, 0] = np.nan
    bad.graph.initializer[1].CopyFrom(numpy_helper.from_array(array, bad.graph.initializer[1].name))
    onnx.save(bad, tmp_path / "nan_weight.onnx")
    broken = nets.mlp()
    broken.graph.node[2].op_type = "NoSuchOp"
    (tmp_path / "unknown_op.onnx").write_bytes(broken.SerializeToString())
    _external(tmp_path)
    _data(tmp_path, feed["x"])
    return tmp_path


def _external(folder: Path) -> None:
    for name in ("missing", "short", "escaping", "absolute"):
        onnx.save(
            nets.mlp(),
            folder / f"{name}.onnx",
            save_as_external_data=True,
            location=f"{name}.onnx.data",
            size_threshold=0,
        )
    (folder / "missing.onnx.data").unlink()
    short = folder / "short.onnx.data"
    short.write_bytes(short.read_bytes()[:-100])
    (folder.parent / "outside.data").write_bytes((folder / "escaping.onnx.data").read_bytes())
    for name, location in (("escaping", "../outside.data"), ("absolute", str(folder.parent / "outside.data"))):
        shell = onnx.load(folder / f"{name}.onnx", load_external_data=False)
        for tensor in shell.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        (folder / f"{name}.onnx").write_bytes(shell.SerializeToString())


def _data(folder: Path, x: Any) -> None:
    nan, inf = x.copy(), x.copy()
    nan[3, 2], inf[:2] = np.nan, np.inf
    wrong = {
        "name": {"input": x, "image": x},
        "more": {"x": x, "z": x},
        "dtype": {"x": x.astype(np.float64)},
        "integers": {"x": x.astype(np.int64)},
        "rank": {"x": x[..., None]},
        "width": {"x": x[:, :5]},
        "nan": {"x": nan},
        "inf": {"x": inf},
        "none": {"x": x[:0]},
        "objects": {"x": np.array([{}, {}], dtype=object)},
    }
    for name, arrays in wrong.items():
        np.savez(folder / f"{name}.npz", **arrays)
    np.savez(folder / "deep.npz", head=np.array("[" * 100_000))
    (folder / "text.npz").write_text("no archive")
    (folder / "half.npz").write_bytes((folder / "d.npz").read_bytes()[:500])
    (folder / "feeds.py").write_text("def fails():\n    raise RuntimeError('mine')\n    yield\n")


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


Mistake = tuple[list[str], int, str]
MODELS: dict[str, Mistake] = {
    "text": (["text.onnx"], RUNTIME, "not an ONNX model"),
    "empty": (["empty.onnx"], RUNTIME, "not an ONNX model"),
    "ORT format": (["mobile.ort"], RUNTIME, "give the .onnx file that it was made from"),
    "Git LFS": (["pointer.onnx"], RUNTIME, "git lfs pull"),
    "an archive": (["d.npz"], RUNTIME, "It is an archive"),
    "cut at 10 %": (["truncated10.onnx"], RUNTIME, "truncated"),
    "cut in half": (["truncated50.onnx"], RUNTIME, "truncated"),
    "cut at 99 %": (["truncated99.onnx"], RUNTIME, "truncated"),
    "absent": (["absent.onnx"], RUNTIME, "no file"),
    "a folder": (["."], RUNTIME, "folder"),
    "data as model": (["d.npz"], RUNTIME, "not an ONNX model"),
    "missing external data": (["missing.onnx"], RUNTIME, "missing.onnx.data"),
    "short external data": (["short.onnx"], RUNTIME, "truncated"),
    "escaping external data": (["escaping.onnx"], RUNTIME, "outside"),
    "absolute external data": (["absolute.onnx"], RUNTIME, "outside"),
    "opset of the future": (["opset.onnx"], RUNTIME, "Opset 99"),
    "opset zero": (["no_opset.onnx"], RUNTIME, "domain_version of 0"),
    "unknown op": (["unknown_op.onnx"], RUNTIME, "NoSuchOp"),
    "NaN in a weight": (["nan_weight.onnx"], RUNTIME, "NaN"),
    "NaN in a weight, no data": (["nan_weight.onnx", "--compensate", "none", "--selector", "l2"], RUNTIME, "NaN"),
    "nothing to compress": (["single.onnx"], NOTHING, "nothing could be compressed"),
    "none of the kinds": (["m.onnx", "--blocks", "conv,heads"], NOTHING, "none of the 3 blocks"),
    "none of the names": (["m.onnx", "--include", "nowhere"], NOTHING, "none of the 3 blocks"),
    "too little": (["m.onnx", "--ratio", "0.001"], NOTHING, "removes no unit"),
}
DATA: dict[str, Mistake] = {
    "absent": (["absent.npz"], RUNTIME, "no calibration data"),
    "text": (["text.npz"], RUNTIME, "text.npz"),
    "truncated": (["half.npz"], RUNTIME, "half.npz"),
    "a model": (["m.onnx"], RUNTIME, "not known"),
    "wrong name": (["name.npz"], RUNTIME, "no array for input 'x', has 'image' float32"),
    "one too many": (["more.npz"], RUNTIME, "no input named 'z'"),
    "float64": (["dtype.npz"], RUNTIME, "got float64, expected float32. Convert it with .astype('float32')"),
    "integers": (["integers.npz"], RUNTIME, "got int64, expected float32"),
    "rank": (["rank.npz"], RUNTIME, "got rank 3"),
    "width": (["width.npz"], RUNTIME, "got 5 at axis 1"),
    "NaN": (["nan.npz"], RUNTIME, "input 'x': 1 of 1200 values are NaN or infinite"),
    "infinity": (["inf.npz"], RUNTIME, "24 of 1200"),
    "no samples": (["none.npz"], RUNTIME, "no samples"),
    "pickles": (["objects.npz"], RUNTIME, "pickle"),
    "code that fails": (["feeds.py:fails"], RUNTIME, "raised RuntimeError: mine"),
    "absent function": (["feeds.py:absent"], RUNTIME, "no 'absent'"),
}
OPTIONS: dict[str, Mistake] = {
    "ratio 1": (["--ratio", "1.0"], USAGE, "would remove everything"),
    "negative ratio": (["--ratio", "-0.1"], USAGE, "out of range"),
    "ratio nan": (["--ratio", "nan"], USAGE, "out of range"),
    "selector": (["--selector", "foo"], USAGE, "'foo'"),
    "compensation": (["--compensate", "foo"], USAGE, "'foo'"),
    "ratio and target": (["--ratio", "0.3", "--target-macs", "60%"], USAGE, "--ratio and --target-macs exclude"),
    "sparsity and target": (["--sparsity", "0.3", "--target-size", "60%"], USAGE, "--ratio and --target-size exclude"),
    "two targets": (
        ["--target-params", "1k", "--target-latency", "8ms"],
        USAGE,
        "--target-params and --target-latency",
    ),
    "target 0": (["--target-params", "0"], USAGE, "not a positive amount"),
    "negative target": (["--target-params", "-5"], USAGE, "not a positive amount"),
    "target over all": (["--target-macs", "120%"], USAGE, "more than all"),
    "share without percent": (["--target-params", "0.6"], USAGE, "For a share write 60%"),
    "target of another unit": (["--target-size", "8ms"], USAGE, "has no unit of"),
    "time without unit": (["--target-latency", "8"], USAGE, "Write 60% or 8ms"),
    "params out of reach": (["--target-params", "1%"], USAGE, "out of reach: with all of 3 blocks"),
    "macs out of reach": (["--target-macs", "10"], USAGE, "--target-macs 10 is out of reach"),
    "size out of reach": (["--target-size", "100"], USAGE, "--target-size 100 is out of reach"),
    "latency out of reach": (["--target-latency", "0.001us"], USAGE, "--target-latency 0.001us is out of reach"),
    "global out of reach": (["--target-params", "1%", "--allocate", "global"], USAGE, "out of reach"),
    "budget of all": (["--target-params", "100%"], NOTHING, "--target-params 100% allows"),
    "allocation": (["--allocate", "foo"], USAGE, "'foo'"),
    "statistics that are not there": (["--stats", "absent.npz"], RUNTIME, "Make it with --save-stats"),
    "statistics that are data": (["--stats", "d.npz"], RUNTIME, "'d.npz' holds no statistics"),
    "statistics that are text": (["--stats", "text.npz"], RUNTIME, "'text.npz' holds no statistics"),
    "statistics without bottom": (["--stats", "deep.npz"], RUNTIME, "'deep.npz' holds no statistics"),
    "statistics over data": (["--save-stats", "d.npz"], RUNTIME, "--force"),
    "statistics over the model": (["--save-stats", "m.onnx", "--force"], RUNTIME, "is the input"),
    "statistics over the output": (["-o", "o.onnx", "--save-stats", "o.onnx"], USAGE, "is the file of --output"),
    "statistics in and out": (["--stats", "a.npz", "--save-stats", "b.npz"], USAGE, "exclude each other"),
    "statistics folder is a file": (["--save-stats", "d.npz/s.npz"], RUNTIME, "is not a folder"),
    "reducer": (["--reducer", "foo"], USAGE, "'foo'"),
    "blocks": (["--blocks", "foo"], USAGE, "choose from"),
    "include": (["--include", "("], USAGE, "regular expression"),
    "exclude": (["--exclude", "[a"], USAGE, "regular expression"),
    "batch size": (["--batch-size", "0"], USAGE, "--batch-size"),
    "samples": (["--samples", "-1"], USAGE, "--samples"),
    "provider": (["--providers", "NoExecutionProvider"], USAGE, "NoExecutionProvider"),
    "input shapes": (["--input-shapes", "x:1,b"], USAGE, "is not NAME:"),
    "shape of no input": (["--input-shapes", "z:1,12"], USAGE, "no such input"),
    "shape that does not fit": (["--input-shapes", "x:1,13"], USAGE, "does not fit"),
    "option": (["--nonsense"], USAGE, "--nonsense"),
    "gate without the check": (["--no-check", "--min-cosine", "0.9"], USAGE, "check=False (--no-check) turns off"),
    "output equals input": (["-o", "m.onnx", "--force"], RUNTIME, "is the input"),
    "output exists": (["-o", "single.onnx"], RUNTIME, "--force"),
    "output is a folder": (["-o", "."], RUNTIME, "folder"),
    "output is no file": (["-o", "-"], RUNTIME, "'-' is no file name"),
    "output folder is a file": (["-o", "d.npz/o.onnx"], RUNTIME, "d.npz"),
    "output folder is read-only": (["-o", "/proc/o.onnx"], RUNTIME, "cannot write"),
    "report folder is a file": (["--report", "d.npz/r.json"], RUNTIME, "is not a folder"),
    "report replaces the model": (["--report", "m.json", "-o", "m.json"], USAGE, "is the file of --output"),
    "report kind": (["--report", "r.txt"], USAGE, "written as .json"),
}
CASES = {
    **{f"model: {name}": case for name, case in MODELS.items()},
    **{f"data: {name}": (["m.onnx", "--data", *words], code, text) for name, (words, code, text) in DATA.items()},
    **{f"option: {name}": (["m.onnx", *words], code, text) for name, (words, code, text) in OPTIONS.items()},
}


def judge(code: int, stdout: str, stderr: str, expected: int, text: str) -> None:
    assert code == expected, stderr
    assert "Traceback" not in stdout + stderr
    assert "internal error" not in stderr
    lines = said(stderr).splitlines()
    # click puts how to call a command in front of its own complaints.
    lines = [line for line in lines if expected != USAGE or (line and not line.startswith(("Usage: ", "Try ")))]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("Error: ")
    assert text in lines[0]
    assert stdout == ""


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_written(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, code, text = CASES[name]
    monkeypatch.chdir(folder)
    before = listing(folder.parent)
    result = CliRunner().invoke(main, ["compress", *sized(words)])
    judge(result.exit_code, result.stdout, result.stderr, code, text)
    assert listing(folder.parent) == before
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("name", ["model: nothing to compress", "data: NaN", "option: ratio 1"])
def test_the_same_in_a_process_of_its_own(name: str, folder: Path) -> None:
    words, code, text = CASES[name]
    before = listing(folder)
    done = subprocess.run(
        [sys.executable, "-m", "onnxgrail", "compress", *sized(words)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    judge(done.returncode, done.stdout, done.stderr, code, text)
    assert listing(folder) == before


@pytest.mark.parametrize("command", ["inspect", "compare"])
@pytest.mark.parametrize("name", [n for n, (words, code, _) in MODELS.items() if code == RUNTIME and len(words) == 1])
def test_other_commands_refuse_the_same_files(
    name: str, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,), code, text = MODELS[name]
    if name in {"absent", "NaN in a weight"}:
        text = ""  # said in other words, and no mistake
    monkeypatch.chdir(folder)
    before = listing(folder.parent)
    words = [model] if command == "inspect" else [model, "m.onnx"]
    result = CliRunner().invoke(main, [command, *words])
    if name == "NaN in a weight":
        assert result.exit_code in (0, RUNTIME)
    else:
        judge(result.exit_code, result.stdout, result.stderr, code, text)
    assert listing(folder.parent) == before


def test_a_failed_gate_still_writes(folder: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "onnxgrail",
            "compress",
            "m.onnx",
            "--ratio=0.3",
            "--data",
            "d.npz",
            "--min-cosine",
            "1",
            "--json",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == GATE
    (line,) = (line for line in said(done.stderr).splitlines() if not line.startswith("Note: "))
    assert line.startswith("Error: gate failed: cosine 0.9")
    assert '"schema": 1' in done.stdout
    onnx.checker.check_model(folder / "m.compressed.onnx")
    passed = CliRunner().invoke(
        main, ["compress", str(folder / "m.onnx"), "--ratio=0.3", "--force", "--min-cosine", "0.5"]
    )
    assert passed.exit_code == 0
