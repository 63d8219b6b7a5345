"""Numbers that fit nowhere, names that no system takes, and patterns that nest too deeply: one line each."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from onnxgrail import apply, bench, compare, compress, frontier, inspect
from onnxgrail.allocation.ladders import WIDEST, divisors
from onnxgrail.errors import OnnxGrailError, UsageError
from onnxgrail.machine.amounts import whole
from onnxgrail.machine.group.torchrun import join
from tests.command import run
from tests.e2e import nets

NINES = "9" * 5000  # more digits than Python turns into a number
TOO_LONG = "name too long|no (calibration data|statistics file|file) "  # from Python 3.14 on, there is no such file
DATA = ("compress", "m.onnx", "o.onnx", "--data", "d.npz")
RANDOM = ("compress", "m.onnx", "o.onnx", "--unit-ratio", "0.3")
CASES = {
    "random samples": ((*RANDOM, "--samples", 10**14), 2, "random samples are too many, at most 1000000"),
    "random samples to compare": (("compare", "m.onnx", "m.onnx", "--samples", 10**14), 2, "are too many"),
    "a batch to time": (("bench", "m.onnx", "--batch-size", 10**14), 2, "are too many"),
    "rounds": (
        ("bench", "m.onnx", "--rounds", 2**63),
        2,
        "rounds is 9223372036854775808, expected a whole number below",
    ),
    "threads": (
        ("bench", "m.onnx", "--threads", 2**63),
        2,
        "threads is 9223372036854775808, expected a whole number below",
    ),
    "batch sizes of many digits": (("bench", "m.onnx", "--batch-size", NINES), 2, "is not a list of sizes"),
    "a size of many digits": ((*RANDOM, "--input-shapes", f"x:{NINES},12"), 2, "is not NAME:1,3,224,224"),
    "a superscript as size": ((*RANDOM, "--input-shapes", "x:²,12"), 2, "is not NAME:1,3,224,224"),
    "a large size": ((*RANDOM, "--input-shapes", f"x:{2**63},12"), 2, "expected"),
    "samples of many digits": ((*DATA, "--samples", NINES), 2, "is not a valid integer range"),
    "held out": ((*DATA, "--held-out", 10**14), 1, "samples are to be held out"),
    "held out, of many digits": ((*DATA, "--held-out", NINES), 1, TOO_LONG),
    "a ratio": ((*DATA, "--ratio", "1e30"), 2, "out of range"),
    "a target": ((*DATA, "--target-params", f"{NINES}M"), 2, "not a positive amount"),
    "memory": ((*DATA, "--cache-budget", f"{NINES}G"), 2, "--cache-budget"),
    "a nested pattern": ((*DATA, "--include", "(" * 5000 + ")" * 5000), 2, "nested too deeply"),
    "a repetition without end": ((*DATA, "--exclude", f"a{{{10**20}}}"), 2, "is not a regular expression"),
    "a long name of data": ((*RANDOM, "--data", f"{NINES}.npz"), 1, TOO_LONG),
    "a long name of a model": (("inspect", NINES), 1, TOO_LONG),
    "a long name of an output": (("compress", "m.onnx", NINES, "--unit-ratio", "0.3"), 1, TOO_LONG),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_says_what_is_wrong(name, tmp_path, monkeypatch):
    words, code, text = CASES[name]
    monkeypatch.chdir(tmp_path)
    onnx.save(nets.mlp(), "m.onnx")
    np.savez("d.npz", **nets.vectors())
    result = run(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage: ", "Try "))]
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert "internal error" not in lines[0]
    assert re.search(text, lines[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.npz", "m.onnx"]


CALLS = {
    "a model": lambda: inspect(NINES),
    "a report": lambda: inspect("m.onnx", report=f"{NINES}.json"),
    "an output": lambda: compress("m.onnx", NINES, unit_ratio=0.3),
    "data": lambda: compare("m.onnx", "m.onnx", data=NINES),
    "statistics": lambda: compress("m.onnx", "o.onnx", unit_ratio=0.3, stats=NINES),
    "a recipe": lambda: apply(NINES, "m.onnx", "o.onnx"),
    "a model to time": lambda: bench(NINES),
    "a model for points": lambda: frontier(NINES, data="d.npz"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_cannot_be_looked_up_is_an_error_of_ours_in_python_too(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(nets.mlp(), "m.onnx")
    np.savez("d.npz", **nets.vectors())
    with pytest.raises(OnnxGrailError, match=TOO_LONG):
        CALLS[name]()


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), (" 12 ", 12), ("0", 0), ("-1", None), ("²", None), ("1e3", None), (NINES, None)]
)
def test_whole_numbers(text, number):
    assert whole(text) == number


@pytest.mark.parametrize("size", ["²", NINES, "-1", "two"])
def test_an_environment_without_numbers(size, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UsageError, match="a number is needed"), join():
        pass


def test_a_recipe_with_too_large_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(nets.mlp(), "m.onnx")
    (tmp_path / "r.json").write_text(f'{{"held_out": {2**70}}}')
    result = run("apply", "r.json", "m.onnx", "o.onnx")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "held_out is 1180591620717411303424, expected a whole number below" in result.stderr


def test_a_multiple_larger_than_any_block_takes_no_time():
    assert max(divisors(10**18)) <= WIDEST
    assert divisors(12) == (12, 6, 4, 3, 2, 1)
