"""Odd recipes, reports, statistics, kept runs and options: one line that says what is wrong, and no code runs."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from onnxgrail.core import Recipe
from onnxgrail.recipe.keywords import READERS
from tests.mutation import worker
from tests.mutation.choices import MAKERS
from tests.mutation.pool import run

COUNT, SEED = 45, 17


@pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks of memory are read from /proc")
def test_odd_choices_are_told_in_one_line() -> None:
    found = run(range(COUNT), seed=SEED, kind="choices")
    assert [v for v in found if v["faults"]] == []
    names = Counter(v["name"].partition(" ")[0].partition(":")[0] for v in found)
    assert set(names) == {maker.__name__ for maker in MAKERS} - {"resumed"} | {"resume"}
    assert {v["code"] for v in found} >= {0, 1, 2}


def test_the_watch_sees_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_watched", str(tmp_path))
    monkeypatch.setattr(worker, "_written", [])
    for name in (str(tmp_path / "evil.py"), __file__):
        worker._watch("exec", (compile("1", name, "exec"),))
    assert worker._written == [f"run: {tmp_path / 'evil.py'}"]


def test_every_choice_has_a_kind() -> None:
    assert not [field.name for field in fields(Recipe) if field.name not in READERS]
