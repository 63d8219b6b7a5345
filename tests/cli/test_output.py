"""Prints and exit codes of `compress`.  Mistakes in files and data are in `tests/e2e`."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from onnxgrail.cli.parts import progress as _progress
from onnxgrail.errors import DataError, UsageError
from onnxgrail.report.report import Report
from tests.cli.standin import data, recorded, replace_compress
from tests.command import run, said
from tests.e2e import nets
from tests.verdicts import checked, output, verdict


def test_table_and_notes(monkeypatch):
    recorded(monkeypatch)
    result = run("compress", "m.onnx", "o.onnx")
    assert "21.30 M" in result.stdout
    assert "-29.6 %" in result.stdout
    assert (
        "Ratio: asked 30.0 %, achieved 28.4 % of the 20.00 M parameters in blocks that can be narrowed\n"
        "Whole model: 29.6 % of the 21.30 M parameters removed\n"
    ) in result.stdout
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
        ("latency", (10.0, 6.0, 5.87), "Target latency: asked 60% = 6 ms, achieved 5.87 ms (58.7 %), measured once"),
    ],
)
def test_a_budget_is_printed_instead_of_the_ratio(monkeypatch, metric, numbers, line):
    before, limit, achieved = numbers
    budget = {"metric": metric, "asked": "60%", "before": before, "limit": limit, "achieved": achieved}
    rounding = [{"block": "a", "units": 9, "asked": 4.4, "kept": 4, "multiple": 4, "params": -30}]
    rounding += [
        {"block": n, "units": 9, "asked": 4.6, "kept": k, "multiple": k, "params": p}
        for n, k, p in (("b", 4, -70), ("c", 8, 1234))
    ]
    shown = data(
        model={**data()["model"], "asked_ratio": None, "budget": budget},
        allocation={"asked": "global", "used": "global", "note": "", "rounding": rounding},
    )
    result = SimpleNamespace(report=Report(data=shown), output=None, gates_passed=True)
    replace_compress(monkeypatch, lambda: result)
    text = run("compress", "m.onnx").stdout
    assert line in text
    assert "Ratio: " not in text
    assert "Allocation: asked global, used global" in text
    assert "Widths rounded (--round-to 8): 2 blocks, 1,164 parameters more than without" in text
    assert "Finer steps, where 8 is too coarse for a block or the total: 2 blocks by 4" in text
    assert "1 block left at full width: not selected" in text


def printed(monkeypatch, **changes):
    """Return what `compress` prints for a report."""
    result = SimpleNamespace(report=Report(data=data(**changes)), output=None, gates_passed=True)
    replace_compress(monkeypatch, lambda: result)
    return run("compress", "m.onnx")


def cosines(*values):
    """Outputs y0, y1, ... with these cosines."""
    return [output(f"y{n}", verdict(value=value)) for n, value in enumerate(values)]


def test_of_many_outputs_the_worst_have_a_line(monkeypatch):
    text = printed(monkeypatch, verification=checked(*cosines(0.99, 0.98, 0.97, 0.96, 0.95, 0.94))).stdout
    assert re.findall(r"Output (y\d): cosine", text) == ["y1", "y2", "y3", "y4", "y5"]  # y0 is the headline
    text = printed(monkeypatch, verification=checked(*cosines(0.5, 0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 1))).stdout
    assert re.findall(r"Output (y\d): cosine", text) == ["y6", "y5", "y4", "y3"]
    assert "3 more outputs are closer (see --report)" in text


def test_the_worst_output_is_the_headline(monkeypatch):
    """Each by the measure that suits it; what was measured on random inputs is no quality."""
    scores = output("scores", verdict("scores", 0.44, part="columns 4 to 84", details={"top_1_percent": 0.3}))
    boxes = output("boxes", verdict("values", 0.0004, details={"worst_channel": 0.2, "channel": 3}))
    result = printed(monkeypatch, verification=checked(scores, boxes))
    said = "F1 of scores above 0.5 44.0 % (43.0 to 45.0 %, lowest sample 34.0 %)"
    assert f"Fidelity: {said}, output scores, columns 4 to 84 on 16 held-out samples\n" in result.stdout
    assert "Output scores: columns 4 to 84: 30.0 % of the top 1 % the same\n" in result.stdout
    assert "Output boxes: NMSE 0.0004 (" in result.stdout
    assert "worst channel 3 0.2\n" in result.stdout
    assert (
        "Note: output scores, columns 4 to 84 is far from the original (F1 of scores above 0.5 44.0 %)" in result.stderr
    )
    seen = printed(monkeypatch, verification=checked(scores, on="calibration")).stdout
    assert "on 16 calibration samples; the fit has seen these samples\n" in seen
    drawn = printed(monkeypatch, verification=checked(scores, on="random"))
    assert "Fidelity: not known, random inputs say nothing about quality (F1 of scores" in drawn.stdout
    assert "is far from" not in drawn.stderr


@pytest.mark.parametrize(
    ("recipe", "ways"),
    [
        ({"ratio": 0.3}, "more real --data, a smaller --ratio or --selector obs"),
        ({"unit_ratio": 0.3}, "more real --data, a smaller --unit-ratio or --selector obs"),
        ({"max_loss": 0.1}, "more real --data, a smaller --max-loss or --selector obs"),
        ({"target_size": 1000}, "more real --data, a larger --target-size or --selector obs"),
        ({"target_macs": 1000, "selector": "obs"}, "more real --data or a larger --target-macs"),
        ({"ratio": 0, "quantize": "int8"}, "more real --data"),
    ],
)
def test_the_advice_names_the_option_that_was_given(monkeypatch, recipe, ways):
    asked = {"ratio": None, "unit_ratio": None, "max_loss": None, "target_size": None, "target_macs": None, **recipe}
    found = checked(output("scores", verdict("scores", 0.44)))
    result = printed(monkeypatch, verification=found, recipe={**data()["recipe"], **asked})
    assert f"(F1 of scores above 0.5 44.0 %): {ways} bring it closer" in result.stderr


@pytest.mark.parametrize(("share", "words"), [(0.25, "25.0 %"), (1.39, "all")])
def test_no_more_than_all_is_lost(monkeypatch, share, words):
    outputs = [output(name, verdict("values", 0.04, details={"unexplained": share})) for name in ("y0", "y1")]
    text = printed(monkeypatch, verification=checked(*outputs)).stdout
    assert f" {words} of what differs between samples is lost" in text


def test_whole_numbers_are_equal_or_not(monkeypatch):
    label = output("label", verdict("labels", 0.75, measure="equal values", interval=None), cosine=None, nmse=None)
    text = printed(monkeypatch, verification=checked(label, on="random", samples=1)).stdout
    assert "(equal values 75.0 %, output label on 1 random input)" in text


def test_values_that_are_no_numbers_are_the_headline(monkeypatch):
    broken = output("y", verdict(value=None, loss=None, details={"broken": 1.0}))
    result = printed(monkeypatch, verification=checked(broken))
    assert "Fidelity: cosine not a number, output y on 16 held-out samples" in result.stdout
    assert "output y is far from the original (cosine not a number)" in result.stderr


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((1.2, 1.4), "narrowed 8 ms: 1.25 times as fast (1.20 to 1.40)"),
        ((0.9, 1.4), "narrowed 8 ms: no measurable difference (0.90 to 1.40 times as fast)"),
    ],
)
def test_a_latency_comes_with_its_interval(monkeypatch, interval, words):
    steps = [{"name": "original", "median": 10.0, "ratio": None, "interval": None}]
    steps.append({"name": "narrowed", "median": 8.0, "ratio": 1.25, "interval": interval})
    assert f"Latency of one run: original 10 ms, {words}\n" in printed(monkeypatch, latency=steps).stdout


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
    return tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--ratio", 0.3


def test_the_table_shows_what_the_report_says(tiny, tmp_path):
    result = run("compress", *tiny, "--report", tmp_path / "r.json")
    assert result.exit_code == 0
    assert "Warning" not in result.stderr
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
    rest = run("compress", *tiny, "--force", "--no-progress").stderr
    assert all(line.startswith("Note: ") for line in rest.splitlines()), rest
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
    result = run("compress", tmp_path / "single.onnx", "--ratio", 0.3, "--report", tmp_path / "r.json", "--json")
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
