"""The command line: how it starts, and what it passes on.  What it prints is in `test_output`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import click
import pytest

from onnxgrail.cli import main
from onnxgrail.core import Recipe
from onnxgrail.machine.amounts import METRICS
from tests.cli.standin import recorded, usage_error
from tests.command import run


@pytest.fixture
def calls(monkeypatch):
    return recorded(monkeypatch)


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


@pytest.mark.parametrize("command", ["compress", "refine", "inspect", "compare", "bench", "apply", "demo"])
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert main.commands[command].help
    for parameter in main.commands[command].params:
        assert isinstance(parameter, click.Argument) or parameter.hidden or parameter.help, parameter.name


def test_version():
    assert run("--version").output.startswith("onnxgrail ")


def test_defaults_equal_the_recipe(calls):
    assert run("compress", "m.onnx").exit_code == 0
    recipe = Recipe()
    for field in dataclasses.fields(Recipe):
        if field.name in calls[0]:
            assert calls[0][field.name] == getattr(recipe, field.name), field.name
    missing = {f.name for f in dataclasses.fields(Recipe)} - set(calls[0])
    filled = {"allocate", "compensate", "refine", "selector"}  # by --effort, if nobody gives them
    assert missing == {"ridge", "widths", "bits", *filled}
    for parameter in main.commands["compress"].params:
        if parameter.name in filled:
            assert parameter.default == (getattr(recipe, parameter.name) or "none"), parameter.name


@pytest.mark.parametrize("metric", METRICS)
def test_a_target_takes_the_place_of_the_ratio(calls, metric):
    assert run("compress", "m.onnx", f"--target-{metric}", "60%", "--allocate", "depth").exit_code == 0
    assert calls[0]["ratio"] is None
    assert (calls[0][f"target_{metric}"], calls[0]["allocate"]) == ("60%", "depth")
    for option in ("--ratio", "--sparsity"):
        message = usage_error("compress", "m.onnx", f"--target-{metric}", "60%", option, "0.3")
        assert f"--ratio and --target-{metric} exclude each other" in message


def test_statistics_files_reach_the_library(calls):
    assert run("compress", "m.onnx", "--stats", "a.npz").exit_code == 0
    assert run("compress", "m.onnx", "--save-stats", "b.npz").exit_code == 0
    assert [(str(c["stats"]), str(c["save_stats"])) for c in calls] == [("a.npz", "None"), ("None", "b.npz")]


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


@pytest.mark.parametrize(("device", "first"), [("cuda:1", ":1"), ("CUDA:0,1", ":0,1")])
def test_a_device_may_have_a_number(calls, device, first):
    run("compress", "m.onnx", "--device", device)
    assert calls[0]["providers"] == (f"CUDAExecutionProvider{first}", "CPUExecutionProvider")


def test_ways_to_name_providers_output_and_ratio(calls):
    run("compress", "m.onnx", "-o", "p.onnx", "--providers", "A,B", "--providers", "C", "--sparsity", "40%")
    assert calls[0]["providers"] == ("A", "B", "C")
    assert str(calls[0]["output"]) == "p.onnx"
    assert calls[0]["ratio"] == 0.4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ratio", "1.0"], "would remove everything"),
        (["--ratio", "-0.1"], "out of range"),
        (["--ratio", "nan"], "out of range"),
        (["--ratio", "30"], "30 is out of range: choose 0 <= R < 1, such as 0.3 or 30%"),
        (["--ratio", "%"], "'%' is not a number: choose 0 <= R < 1, such as 0.3 or 30%"),
        (["--blocks", "conv,foo"], "choose from"),
        (["--blocks", ","], "choose from"),
        (["--include", "("], "regular expression"),
        (["--input-shapes", "1,2"], "is not NAME:"),
        (["--input-shapes", "x:1,-2"], "is not NAME:"),
        (["--report", "r.md"], "written as .json"),
        (["--selector", "foo"], "--selector"),
        (["--samples", "0"], "--samples"),
        (["--device", "cuda", "--providers", "A"], "not both"),
        (["--device", "gpu"], "choose cpu, cuda"),
        (["--device", "cuda:"], "choose cpu, cuda"),
        (["o.onnx", "-o", "p.onnx"], "once"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_usage_errors_exit_2(calls, words, message):
    assert message in usage_error("compress", "m.onnx", *words)
    assert not calls
