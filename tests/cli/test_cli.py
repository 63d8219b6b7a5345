"""The command line.  Where a command calls the pipeline, a STUB stands in: swap it for the real thing as it lands."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.cli import _options, main
from onnxgrail.core import KINDS, Recipe, Refusal
from onnxgrail.errors import DataError, NothingToCompressError, UsageError
from onnxgrail.report import Inspection, Report

REFUSAL = {"value": "v", "node": "n[0]", "op": "Foo", "reason": "no rule for Foo-1"}


def data(**changes):
    sizes = {"params_before": 21_300_000, "params_after": 15_000_000, "macs_before": 2000, "macs_after": None}
    model = {"input": "m.onnx", "output": "o.onnx", "bytes_before": 900, "bytes_after": 4000, **sizes}
    return {
        "schema": 1,
        "recipe": {"min_cosine": 0.99, "blocks": ["conv", "mlp", "heads"]},
        "model": {**model, "asked_ratio": 0.3, "achieved_ratio": 0.284},
        "calibration": {"source": "synthetic", "samples": 64, "synthetic": True, "notes": ["no --data: drawn"]},
        "blocks": [
            {"kind": "conv", "units": 10, "kept": 7, "outcome": {"status": "ok", "reason": ""}},
            {"kind": "conv", "units": 4, "kept": 4, "outcome": {"status": "skipped", "reason": "not selected"}},
            {"kind": "stream", "units": 8, "kept": 8, "outcome": {"status": "skipped", "reason": "not selected"}},
        ],
        "refusals": [REFUSAL],
        "verification": {"outputs": [{"name": "y", "cosine": 0.98, "nmse": 0.01, "max_abs": 1.0}]},
        "notes": ["a note"],
        **changes,
    }


@pytest.fixture
def calls(monkeypatch):
    """STUB of `onnxgrail.compress`: records its arguments and returns a canned result."""
    seen = []

    def compress(model, output=None, *, progress, **options):
        progress("trace", 0, 1)
        seen.append({"model": model, "output": output, **options})
        return SimpleNamespace(report=Report(data=data()), output=output, gates_passed=True)

    monkeypatch.setattr(onnxgrail, "compress", compress, raising=False)
    return seen


def replace_compress(monkeypatch, function):
    """STUB: what `onnxgrail.compress` does instead."""
    monkeypatch.setattr(onnxgrail, "compress", lambda *args, **kwargs: function(), raising=False)


def run(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def usage_error(*words):
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr
    return result.stderr


# ---------------------------------------------------------------------------------------------- start and help


def test_help_imports_click_only():
    code = (
        "import sys, onnxgrail.cli\n"
        "try: onnxgrail.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'torch', 'scipy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "compress" in done.stdout


@pytest.mark.parametrize("command", ["compress", "inspect", "compare", "demo"])
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert main.commands[command].help
    for parameter in main.commands[command].params:
        assert isinstance(parameter, click.Argument) or parameter.hidden or parameter.help, parameter.name


def test_version():
    assert run("--version").output.startswith("onnxgrail ")


def test_literal_choices_equal_the_library():
    from onnxgrail.algebra.compensate import COMPENSATORS
    from onnxgrail.algebra.reducers import REDUCERS
    from onnxgrail.algebra.selectors import SELECTORS

    assert set(_options.SELECTORS) == set(SELECTORS)
    assert set(_options.REDUCERS) == set(REDUCERS)
    assert set(_options.COMPENSATORS) == set(COMPENSATORS)
    assert set(_options.BLOCKS) == set(KINDS)


def test_defaults_equal_the_recipe(calls):
    assert run("compress", "m.onnx").exit_code == 0
    recipe = Recipe()
    for field in dataclasses.fields(Recipe):
        if field.name in calls[0]:
            assert calls[0][field.name] == getattr(recipe, field.name), field.name
    missing = {f.name for f in dataclasses.fields(Recipe)} - set(calls[0])
    assert missing == {"ridge"}


# -------------------------------------------------------------------------------------------------- compress


def test_options_reach_the_library(calls):
    words = [
        *(
            "compress",
            "m.onnx",
            "o.onnx",
            "--ratio",
            "0.5",
            "--blocks",
            "mlp, heads",
            "--include",
            "a.*",
            "--calib",
            "d.npz",
        ),
        *("--samples", "7", "--selector", "l1", "--open-loop", "--round-to", "1", "--device", "cuda", "--seed", "3"),
        *("--input-shapes", "x:1,3,224,224", "--input-shapes", "y:0:[1,2]", "--input-shapes", "z:2x3", "--no-check"),
        *(
            "--force",
            "--dry-run",
            "--save-as-external-data",
            "--compensate",
            "none",
            "--reducer",
            "fold",
            "--no-progress",
        ),
    ]
    result = run(*words)
    assert result.exit_code == 0, result.output
    got = calls[0]
    assert str(got["output"]) == "o.onnx"
    assert (got["ratio"], got["blocks"], got["include"], got["data"]) == (0.5, ("mlp", "heads"), "a.*", "d.npz")
    assert (got["closed_loop"], got["check"], got["force"], got["dry_run"]) == (False, False, True, True)
    assert got["input_shapes"] == {"x": (1, 3, 224, 224), "y:0": (1, 2), "z": (2, 3)}
    assert got["providers"] == ("CUDAExecutionProvider", "CPUExecutionProvider")


def test_ways_to_name_providers_output_and_ratio(calls):
    run("compress", "m.onnx", "-o", "p.onnx", "--providers", "A,B", "--providers", "C", "--sparsity", "0.4")
    assert calls[0]["providers"] == ("A", "B", "C")
    assert str(calls[0]["output"]) == "p.onnx"
    assert calls[0]["ratio"] == 0.4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ratio", "1.0"], "would remove every unit"),
        (["--ratio", "-0.1"], "out of range"),
        (["--ratio", "nan"], "out of range"),
        (["--ratio", "many"], "is not a number"),
        (["--blocks", "conv,foo"], "choose from"),
        (["--blocks", ","], "choose from"),
        (["--include", "("], "regular expression"),
        (["--input-shapes", "1,2"], "is not NAME:"),
        (["--input-shapes", "x:1,-2"], "is not NAME:"),
        (["--report", "r.html"], "written as .json"),
        (["--report", "no/r.json"], "does not exist"),
        (["--selector", "foo"], "--selector"),
        (["--samples", "0"], "--samples"),
        (["--device", "cuda", "--providers", "A"], "not both"),
        (["--no-check", "--min-cosine", "0.9"], "needs the check"),
        (["o.onnx", "-o", "p.onnx"], "once"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_usage_errors_exit_2(calls, words, message):
    assert message in usage_error("compress", "m.onnx", *words)
    assert not calls


def test_table_and_notes(calls):
    result = run("compress", "m.onnx", "o.onnx")
    assert "21.30 M" in result.stdout
    assert "-29.6 %" in result.stdout
    assert "asked 30.0 % of the units, achieved 28.4 % of the parameters" in result.stdout
    assert "Units of conv blocks (1 of 2 narrowed)" in result.stdout
    assert "1 x no rule for Foo-1" in result.stdout
    assert "stream" not in result.stdout
    assert "Written: o.onnx" in result.stdout
    assert result.stderr == "Warning: no --data: drawn\nNote: a note\n"


def test_json_is_all_of_stdout(calls):
    result = run("compress", "m.onnx", "--json")
    assert json.loads(result.stdout)["schema"] == 1


def test_quiet_and_reports(calls, tmp_path):
    reports = [tmp_path / "a.json", tmp_path / "b.json"]
    result = run("compress", "m.onnx", "-q", "--report", reports[0], "--report", reports[1])
    assert result.output == ""
    assert all(json.loads(path.read_text())["schema"] == 1 for path in reports)
    assert "would replace a model" in usage_error("compress", reports[0], "--report", reports[0])


def test_verbose_logs_stages(calls):
    assert "trace (1 steps)" in run("compress", "m.onnx", "--verbose").stderr


def test_failed_gate_exits_3(monkeypatch):
    replace_compress(monkeypatch, lambda: SimpleNamespace(report=Report(data=data()), output="o", gates_passed=False))
    result = run("compress", "m.onnx", "--min-cosine", "0.99", "-q")
    assert result.exit_code == 3
    assert result.stderr == "Error: gate failed: cosine 0.98000 of output 'y' is below --min-cosine 0.99\n"


def test_nothing_to_compress_exits_4_and_still_reports(monkeypatch, tmp_path):
    def fail():
        raise NothingToCompressError("nothing could be compressed: reasons", report=Report(data=data()))

    replace_compress(monkeypatch, fail)
    result = run("compress", "m.onnx", "--report", tmp_path / "r.json", "--json")
    assert result.exit_code == 4
    assert result.stderr == "Error: nothing could be compressed: reasons\n"
    assert (tmp_path / "r.json").exists()
    assert json.loads(result.stdout)["schema"] == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DataError("bad", hint="Do this"), 1, "Error: bad. Do this\n"),
        (UsageError("bad"), 2, "Error: bad\n"),
        (
            ValueError("two\nlines"),
            1,
            "Error: internal error: ValueError: two lines; please report it with the output of ",
        ),
        (KeyboardInterrupt(), 1, "Error: interrupted\n"),
        (MemoryError(), 1, "Error: out of memory"),
        (OSError(28, "No space left on device", "f"), 1, "Error: f: No space left on device\n"),
    ],
)
def test_errors_are_one_line(monkeypatch, error, code, line):
    def fail():
        raise error

    replace_compress(monkeypatch, fail)
    result = run("compress", "m.onnx")
    assert result.exit_code == code
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_tracebacks_only_with_verbose(monkeypatch):
    replace_compress(monkeypatch, lambda: 1 / 0)
    assert "Traceback" in run("compress", "m.onnx", "--verbose").stderr
    assert "Traceback" not in run("compress", "m.onnx").stderr


# ------------------------------------------------------------------------------------- inspect, compare and demo


def test_inspect(monkeypatch):
    """STUB of `onnxgrail.inspect`."""
    block = {"name": "b[1]", "kind": "conv", "units": 8, "unit_size": 1, "params": 10, "macs": 20}
    found = Inspection(
        path="m.onnx",
        params=100,
        macs=200,
        bytes=400,
        blocks=({**block, "producers": ("w1",), "consumers": ("w2", "w3")},),
        refusals=(Refusal(**REFUSAL),),
        shares={"conv": {"params": 0.1, "macs": 0.25}},
        predicted=({"ratio": 0.25, "params": 90, "macs": 180, "bytes": 360},),
    )
    monkeypatch.setattr(onnxgrail, "inspect", lambda model, *, input_shapes: found, raising=False)
    result = run("inspect", "m.onnx")
    assert result.exit_code == 0, result.output
    for text in ("b[1]", "1/2", "Foo n[0]", "1 x no rule for Foo-1", "25.0 %", "at ratio 0.25 of conv"):
        assert text in result.stdout
    assert "w3" not in result.stdout
    assert "read by w2, w3" in run("inspect", "m.onnx", "--verbose").stdout
    assert json.loads(run("inspect", "m.onnx", "--json").stdout)["blocks"][0]["units"] == 8


def test_refusals_are_grouped_with_examples(monkeypatch):
    """STUB of `onnxgrail.inspect`."""
    refusals = tuple(Refusal(**{**REFUSAL, "node": f"n{k}"}) for k in range(5))
    last = Refusal(value="w", node="", op="", reason="only one unit")
    found = Inspection(path="m", params=1, macs=None, bytes=4, blocks=(), refusals=(last, *refusals))
    monkeypatch.setattr(onnxgrail, "inspect", lambda model, *, input_shapes: found, raising=False)
    lines = [line.strip() for line in run("inspect", "m.onnx").stdout.splitlines()]
    assert lines[lines.index("Left alone:") + 1 :] == [
        *("5 x no rule for Foo-1", "Foo n0", "Foo n1", "Foo n2", "and 2 more (--verbose)"),
        *("1 x only one unit", "w"),
    ]
    assert "no block can be narrowed" in lines[0]
    assert "Foo n4" in run("inspect", "m.onnx", "--verbose").stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (812, "812"), (49_152, "49.2 k"), (222_000, "222 k"), (999_900, "1.00 M"), (2e9, "2.00 G")],
)
def test_short_numbers(value, text):
    from onnxgrail.cli import _render

    assert _render.short(value) == text


@pytest.fixture
def pair(tmp_path):
    """Two real models, the second half the first, and data for them."""
    for name, scale in (("a", 1.0), ("b", 0.5)):
        text = f"""<ir_version: 8, opset_import: ["" : 17]>
            g (float[N, 3] x) => (float[N, 3] y) <float[1] s = {{{scale}}}> {{ y = Mul(x, s) }}"""
        onnx.save(onnx.parser.parse_model(text), tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((11, 3), np.float32))
    return tmp_path


def test_compare(pair):
    result = run("compare", pair / "a.onnx", pair / "b.onnx", "--data", pair / "d.npz", "--min-cosine", "0.9")
    assert result.exit_code == 0, result.output
    assert "2.500e-01" in result.stdout
    assert "MACs" in result.stdout
    failed = run("compare", pair / "a.onnx", pair / "b.onnx", "--data", pair / "d.npz", "--max-nmse", "0.1", "--json")
    assert failed.exit_code == 3
    assert failed.stderr == "Error: gate failed: nmse 0.25 of output 'y' is above --max-nmse 0.1\n"
    assert json.loads(failed.stdout)["gates"][0]["passed"] is False
    drawn = run("compare", pair / "a.onnx", pair / "b.onnx", "-q")
    assert (drawn.exit_code, drawn.output) == (0, "")


def test_compare_misuse(pair):
    (pair / "t.onnx").write_text("text")
    for words in (["a.onnx", "t.onnx"], ["a.onnx", "absent.onnx"], ["a.onnx", "b.onnx", "--data", "absent.npz"]):
        result = run("compare", *(pair / w if "." in w and not w.startswith("-") else w for w in words))
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1


def test_demo(monkeypatch, tmp_path, pair):
    """STUB of `onnxgrail.pipeline.compress` and of the embedded models."""
    from onnxgrail import models

    def compress(model, output, *, ratio, compensate, data, seed, force):
        output.write_bytes((pair / "b.onnx").read_bytes())
        sizes = {"params_before": 100, "params_after": 70, "macs_before": 50, "macs_after": 30}
        return SimpleNamespace(report=Report(data={"model": sizes}))

    def load(name):
        place = {"model": pair / "a.onnx", "calibration": pair / "d.npz", "heldout": pair / "d.npz"}
        return SimpleNamespace(name=name, metric="accuracy", **place)

    monkeypatch.setitem(sys.modules, "onnxgrail.pipeline", SimpleNamespace(compress=compress))
    monkeypatch.setattr(models, "names", lambda: ("tiny",))
    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(
        models, "score", lambda embedded, call: float(call({"x": np.ones((1, 3), np.float32)})[0][0, 0])
    )
    result = run("demo", "--out", tmp_path / "kept", "--ratio", "0.5")
    assert result.exit_code == 0, result.output
    words = [line.split()[:2] for line in result.stdout.splitlines() if line.strip()]
    assert [w for w in words if w[0] in ("dense", "0.5")] == [["dense", "100.00"], ["0.5", "none"], ["0.5", "grail"]]
    assert sorted(p.name for p in (tmp_path / "kept").glob("*.onnx")) == ["tiny.0.5.grail.onnx", "tiny.0.5.none.onnx"]
    rows = json.loads(run("demo", "--json").stdout)["rows"]
    assert [(r["ratio"], r["compensate"], r["score"]) for r in rows][:2] == [(0, "", 1), (0.3, "none", 0.5)]
    assert len(rows) == 5
    assert "no embedded model 'foo'" in run("demo", "--model", "foo").stderr
    assert run("demo", "--ratio", "0").exit_code == 2
