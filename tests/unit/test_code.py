"""Checksums of code that is not ours change with all that it computes, and with nothing else."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrail.job.code import code_of, key_of, packages
from onnxgrail.options import Recipe
from onnxgrail.registry import SELECTORS

PLAIN = """
import numpy as np
SCALE = 2.0
NAMES = {"a", "b", "c"}
def helper(x):
    return x * SCALE
class Loss:
    power = 2
    def __init__(self, weight=1.0):
        self.weight = weight
        self.table = np.arange(3)
        self.again = self
    def __call__(self, a, b, labels=None):
        return helper(np.abs(a - b) ** self.power) * self.weight if "a" in NAMES else 0
def nested(by):
    def loss(a, b, labels=None):
        return helper(by * abs(a - b))
    return loss
"""
CHANGES = {
    "a constant of the module": ("SCALE = 2.0", "SCALE = 3.0"),
    "a set of the module": ('"b", "c"', '"b", "d"'),
    "a function that is called": ("x * SCALE", "x + SCALE"),
    "an attribute of the class": ("power = 2", "power = 3"),
    "a default value": ("weight=1.0", "weight=2.0"),
    "an array": ("np.arange(3)", "np.arange(4)"),
    "the code": ("a - b) ** self", "a + b) ** self"),
}


def loss_of(text: str) -> Any:
    space: dict[str, Any] = {"__name__": "written"}
    exec(compile(text, "written.py", "exec"), space)
    return space["Loss"]()


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_result_changes_the_checksum(change: str) -> None:
    before, after = CHANGES[change]
    assert before in PLAIN
    assert key_of(loss_of(PLAIN)) == key_of(loss_of(PLAIN))
    assert key_of(loss_of(PLAIN.replace(before, after))) != key_of(loss_of(PLAIN))


def test_what_does_not_change_the_result_keeps_the_checksum() -> None:
    assert key_of(loss_of("# a comment\n" + PLAIN.replace("def helper", "\n\ndef helper"))) == key_of(loss_of(PLAIN))


def test_values_that_functions_carry_count() -> None:
    def loss(by: float) -> Any:
        return lambda a, b, labels: by * abs(a - b)

    assert key_of(loss(1)) == key_of(loss(1)) != key_of(loss(2))
    assert key_of(functools.partial(loss, 1)) != key_of(functools.partial(loss, 2))
    assert key_of(loss_of(PLAIN).__call__) != key_of(loss_of(PLAIN.replace("power = 2", "power = 1")).__call__)
    assert key_of(np.mean) != key_of(np.std)


def test_checksums_do_not_depend_on_the_process(tmp_path: Path) -> None:
    (tmp_path / "written.py").write_text(PLAIN)
    text = (
        "from written import Loss, nested as n; from onnxgrail.job.code import key_of as k; print(k(Loss()), k(n(2)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_only_foreign_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(Recipe(ratio=0.5), None) == {}
    monkeypatch.setitem(SELECTORS.data, "mine", loss_of(PLAIN))
    found = code_of(Recipe(ratio=0.5, selector="mine"), max)
    assert found == {"code of selector": key_of(loss_of(PLAIN)), "code of metric": key_of(max)}
    assert all(isinstance(version, str) for version in packages().values())
