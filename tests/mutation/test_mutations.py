"""Broken models and broken data: one line that says what is wrong, and nothing else happens."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.cases import case
from tests.mutation.pool import run

COUNT, PARTS = 240, 3
SEED = 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks of memory are read from /proc")


@pytest.mark.parametrize("part", range(PARTS))
def test_mutations_are_told_in_one_line(part: int) -> None:
    each = COUNT // PARTS
    found = run(range(part * each, (part + 1) * each), seed=SEED)
    assert len(found) == each
    assert [v for v in found if v["faults"]] == []
    codes = Counter(v["code"] for v in found)
    assert codes[0] > each // 10  # some are harmless, or the mutations would all be refused at the door
    assert codes[1] > each // 2


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    made = []
    for name in "ab":
        for number in range(40):
            folder = tmp_path / name / str(number)
            folder.mkdir(parents=True)
            made.append(case(SEED, number, folder))
    assert made[:40] == made[40:]
    assert len({one.name for one in made}) > 20
    for path in (tmp_path / "a").rglob("m.onnx"):
        twin = tmp_path / "b" / path.relative_to(tmp_path / "a")
        there = os.fsencode(str(tmp_path / "a"))
        if there not in path.read_bytes():  # an absolute path to a file outside
            assert path.read_bytes() == twin.read_bytes()
