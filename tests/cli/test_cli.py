"""The command line: what it passes on, prints and exits with.  Mistakes in files and data are in `tests/e2e`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.budget import METRICS
from onnxgrail.cli import _options, main
from onnxgrail.core import KINDS, NORMS, Recipe
from onnxgrail.errors import DataError, UsageError
from onnxgrail.plan import ALLOCATIONS
from onnxgrail.report import Report
from tests.e2e import nets

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
    """Stands in for `onnxgrail.compress` where only its arguments or the layout of fixed numbers count."""
    seen = []

    def compress(model, output=None, *, progress, **options):
        progress("trace", 0, 1)
        seen.append({"model": model, "output": output, **options})
        return SimpleNamespace(report=Report(data=data()), output=output, gates_passed=True)

    monkeypatch.setattr(onnxgrail, "compress", compress, raising=False)
    return seen


def replace_compress(monkeypatch, function):
    """What `onnxgrail.compress` does instead, for errors that cannot be brought about."""
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
    assert _options.ALLOCATIONS == ALLOCATIONS
    assert _options.NORMS == NORMS
    assert _options.TARGETS == METRICS


def test_defaults_equal_the_recipe(calls):
    assert run("compress", "m.onnx").exit_code == 0
    recipe = Recipe()
    for field in dataclasses.fields(Recipe):
        if field.name in calls[0]:
            assert calls[0][field.name] == getattr(recipe, field.name), field.name
    missing = {f.name for f in dataclasses.fields(Recipe)} - set(calls[0])
    assert missing == {"ridge"}


# -------------------------------------------------------------------------------------------------- compress


@pytest.mark.parametrize("metric", METRICS)
def test_a_target_takes_the_place_of_the_ratio(calls, metric):
    assert run("compress", "m.onnx", f"--target-{metric}", "60%", "--allocate", "depth").exit_code == 0
    assert "ratio" not in calls[0]
    assert (calls[0][f"target_{metric}"], calls[0]["allocate"]) == ("60%", "depth")
    for option in ("--ratio", "--sparsity"):
        message = usage_error("compress", "m.onnx", f"--target-{metric}", "60%", option, "0.3")
        assert f"--ratio and --target-{metric} exclude each other" in message


def test_statistics_files_reach_the_library(calls):
    assert run("compress", "m.onnx", "--stats", "a.npz").exit_code == 0
    assert run("compress", "m.onnx", "--save-stats", "b.npz").exit_code == 0
    assert [(str(c["stats"]), str(c["save_stats"])) for c in calls] == [("a.npz", "None"), ("None", "b.npz")]


@pytest.mark.parametrize(
    ("metric", "numbers", "line"),
    [
        ("params", (1e6, 6e5, 598_765), "Target params: asked 60% = 600,000, achieved 598,765 (59.9 %)"),
        ("size", (1e6, 6e5, 598_765), "Target size: asked 60% = 600.00 kB, achieved 598.76 kB (59.9 %)"),
        ("latency", (10.0, 6.0, 5.87), "Target latency: asked 60% = 6 ms, achieved 5.87 ms (58.7 %)"),
    ],
)
def test_a_budget_is_printed_instead_of_the_ratio(monkeypatch, metric, numbers, line):
    before, limit, achieved = numbers
    budget = {"metric": metric, "asked": "60%", "before": before, "limit": limit, "achieved": achieved}
    rounding = [{"block": "a", "units": 9, "asked": 4.4, "kept": 4, "params": -30}]
    rounding += [
        {"block": n, "units": 9, "asked": 4.6, "kept": k, "params": p} for n, k, p in (("b", 4, -70), ("c", 8, 1234))
    ]
    errors = {"uniform": 0.2, "global": 0.05}
    shown = data(
        model={**data()["model"], "asked_ratio": None, "budget": budget},
        allocation={"asked": "global", "used": "global", "errors": errors, "note": "", "rounding": rounding},
    )
    result = SimpleNamespace(report=Report(data=shown), output=None, gates_passed=True)
    replace_compress(monkeypatch, lambda: result)
    text = run("compress", "m.onnx").stdout
    assert line in text
    assert "Ratio: " not in text
    assert "Allocation: asked global, used global (NMSE uniform 2.00e-01, global 5.00e-02)" in text
    assert "Rounding: 2 blocks, +1,164 parameters (see --report)" in text


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


@pytest.fixture
def tiny(tmp_path):
    """A real model with data."""
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors())
    return tmp_path / "m.onnx", "--data", tmp_path / "d.npz"


def test_the_table_shows_what_the_report_says(tiny, tmp_path):
    result = run("compress", *tiny, "--report", tmp_path / "r.json")
    assert (result.exit_code, result.stderr) == (0, "")
    model = json.loads((tmp_path / "r.json").read_text())["model"]
    numbers = [f"{model[f'params_{when}']:,}" for when in ("before", "after")]
    assert re.search(r"Parameters +{} +{} ".format(*numbers), result.stdout)
    assert f"achieved {model['achieved_ratio']:.1%}".replace("%", " %") in result.stdout
    assert "Units of mlp blocks (3 of 3 narrowed)" in result.stdout
    assert f"Written: {tmp_path / 'm.compressed.onnx'}" in result.stdout
    assert "Dry run" in run("compress", *tiny, "--force", "--dry-run").stdout


def test_json_is_all_of_stdout(tiny):
    result = run("compress", *tiny, "--json")
    assert json.loads(result.stdout)["schema"] == 1


def test_quiet_and_reports(tiny, tmp_path):
    reports = [tmp_path / "a.json", tmp_path / "b.json"]
    result = run("compress", *tiny, "-q", "--report", reports[0], "--report", reports[1])
    assert result.output == ""
    assert all(json.loads(path.read_text())["schema"] == 1 for path in reports)
    assert "would replace a model" in usage_error("compress", reports[0], "--report", reports[0])


def test_verbose_logs_stages(tiny):
    assert re.search(r"^\[ .*s\] calibrating \(\d+ steps\)$", run("compress", *tiny, "--verbose").stderr, re.MULTILINE)


def test_failed_gate_exits_3(tiny):
    result = run("compress", *tiny, "--min-cosine", "0.99999", "-q")
    assert result.exit_code == 3
    assert re.fullmatch(
        r"Error: gate failed: cosine 0\.9\d{4} of output 'y' is below --min-cosine 0.99999\n", result.stderr
    )
    assert tiny[0].with_name("m.compressed.onnx").exists()


def test_nothing_to_compress_exits_4_and_still_reports(tmp_path):
    onnx.save(nets.mlp((5, 3)), tmp_path / "single.onnx")
    result = run("compress", tmp_path / "single.onnx", "--report", tmp_path / "r.json", "--json")
    assert result.exit_code == 4
    assert result.stderr.startswith("Error: nothing could be compressed: ")
    assert result.stderr.count("\n") == 1
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(result.stdout)
    assert json.loads(result.stdout)["model"]["output"] is None


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
