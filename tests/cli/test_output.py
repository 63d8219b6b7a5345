"""What `compress` prints and exits with.  Mistakes in files and data are in `tests/e2e`."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from onnxgrail.cli import _progress
from onnxgrail.errors import DataError, UsageError
from onnxgrail.report import Report
from tests.cli.standin import data, recorded, replace_compress
from tests.command import run, said
from tests.e2e import nets


def test_table_and_notes(monkeypatch):
    recorded(monkeypatch)
    result = run("compress", "m.onnx", "o.onnx")
    assert "21.30 M" in result.stdout
    assert "-29.6 %" in result.stdout
    assert "asked 30.0 % of channels, neurons and heads, achieved 28.4 % of the parameters" in result.stdout
    assert "Convolution channels (1 of 2 blocks narrowed)" in result.stdout
    assert "1 x no rule for Foo-1" in result.stdout
    assert "stream" not in result.stdout
    assert "Written: o.onnx" in result.stdout
    assert said(result.stderr) == "Warning: no --data: drawn\nNote: a note\n"


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
    assert "Widths rounded (--round-to): 2 blocks, 1,164 parameters more than without" in text
    assert "1 block left at full width: not selected" in text


def printed(monkeypatch, **changes):
    """What `compress` prints for a report."""
    result = SimpleNamespace(report=Report(data=data(**changes)), output=None, gates_passed=True)
    replace_compress(monkeypatch, lambda: result)
    return run("compress", "m.onnx")


def checks(*cosines):
    return [{"name": f"y{n}", "cosine": c, "nmse": 0.1, "max_abs": 1.0, "samples": 8} for n, c in enumerate(cosines)]


def test_of_many_outputs_the_worst_have_a_line(monkeypatch):
    text = printed(monkeypatch, verification={"outputs": checks(0.99, 0.98, 0.97, 0.96, 0.95, 0.94)}).stdout
    assert text.count("Output y") == 6
    text = printed(monkeypatch, verification={"outputs": checks(1, 0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 1)}).stdout
    assert re.findall(r"Output (y\d)", text) == ["y6", "y5", "y4", "y3", "y2"]
    assert "3 more outputs: cosine 0.98000 or higher (see --report)" in text


def test_whole_numbers_are_equal_or_not(monkeypatch):
    label = {"name": "label", "cosine": None, "nmse": None, "max_abs": None, "agreement": 0.75, "samples": 1}
    text = printed(monkeypatch, verification={"outputs": [label]}).stdout
    assert "Output label: 75.0 % of the values as in the original on 1 synthetic sample\n" in text


def test_outputs_that_are_far_off_are_noted(monkeypatch):
    few = {"source": "d.npz", "samples": 2, "synthetic": False, "notes": []}
    result = printed(monkeypatch, calibration=few, verification={"outputs": checks(0.95, 0.46)})
    assert "Calibration: 2 samples, d.npz" in result.stdout
    assert "on 8 calibration samples" in result.stdout
    assert "Note: output 'y1' is far from the original (cosine 0.46)" in result.stderr
    close = printed(monkeypatch, calibration=few, verification={"outputs": checks(0.95)})
    assert said(close.stderr) == "Note: a note\n"


def test_blocks_that_went_otherwise_are_counted(monkeypatch):
    plain = {"kind": "conv", "units": 8, "kept": 4, "outcome": {"status": "plain", "reason": "no lower error"}}
    text = printed(monkeypatch, blocks=[*data()["blocks"], plain]).stdout
    assert "1 block left at full width: not selected\n" in text
    assert "1 block narrowed without repair: no lower error\n" in text


@pytest.fixture
def tiny(tmp_path):
    """A real model with data."""
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors())
    return tmp_path / "m.onnx", "--data", tmp_path / "d.npz"


def test_the_table_shows_what_the_report_says(tiny, tmp_path):
    result = run("compress", *tiny, "--report", tmp_path / "r.json")
    assert (result.exit_code, said(result.stderr)) == (0, "")
    model = json.loads((tmp_path / "r.json").read_text())["model"]
    numbers = [f"{model[f'params_{when}']:,}" for when in ("before", "after")]
    assert re.search(r"Parameters +{} +{} ".format(*numbers), result.stdout)
    assert f"achieved {model['achieved_ratio']:.1%}".replace("%", " %") in result.stdout
    assert "MLP neurons (3 of 3 blocks narrowed)" in result.stdout
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


def test_stages_are_lines_without_a_terminal(tiny, monkeypatch):
    monkeypatch.setattr(_progress, "SHORT", 0.0)
    told = run("compress", *tiny).stderr
    assert [line for line in told.splitlines() if re.fullmatch(r"\[ *[\d.]+ s\] calibrate: [\d.]+ s", line)], told
    assert not run("compress", *tiny, "--force", "--no-progress").stderr
    wrong = run("compress", *tiny, "--force", "--include", "no block").stderr
    assert wrong.startswith("Error: "), wrong  # what goes wrong at once is one line


def test_failed_gate_exits_3(tiny):
    result = run("compress", *tiny, "--min-cosine", "0.99999", "-q")
    assert result.exit_code == 3
    assert re.fullmatch(
        r"Error: gate failed: cosine 0\.9\d{4} of output 'y' is below --min-cosine 0.99999\n", said(result.stderr)
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
        (KeyboardInterrupt(), 1, "Error: interrupted. With --resume DIR "),
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
