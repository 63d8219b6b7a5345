"""Runs have fewer samples than `--batch-size` says if the activations of all of them would take much memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration import prepare as preparing
from onnxgrail.core import Feed
from onnxgrail.machine.job import Job
from onnxgrail.options import Recipe
from tests.tiny import tiny, two_mlps

SAMPLES, WIDTH = 32, 12
EACH = 4 * 2 * (12 + 48 + 48 + 32)  # about the bytes of a sample's activations
DATA = {"x": np.random.default_rng(0).standard_normal((SAMPLES, WIDTH)).astype(np.float32)}


def sizes(model: ir.Model, data: Any, held_out: Any = None) -> tuple[list[int], tuple[str, ...]]:
    """The samples of each feed, and the notes on the data."""
    found = preparing.prepare(model, data, Job(recipe=Recipe()), held_out)
    judging = [] if found.held_out is None else list(found.held_out.batches)
    return [len(feed["x"]) for feed in [*found.batches, *judging]], found.batches.notes


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "ROOM", 4 * EACH)


@pytest.mark.usefixtures("scarce")
@pytest.mark.parametrize(("data", "held_out"), [(DATA, None), (DATA, 8), ([DATA], None), (None, None)])
def test_large_activations_make_runs_of_fewer_samples(data: Any, held_out: Any) -> None:
    found, notes = sizes(two_mlps(WIDTH, 48, 32), data, held_out)
    if isinstance(data, list):  # the user has made this feed
        assert (found, notes) == ([SAMPLES], ())
        return
    assert 1 <= max(found) < 8
    assert data is None or sum(found) == SAMPLES
    assert any(f"samples per run: {max(found)} instead of 8" in note for note in notes)


@pytest.mark.usefixtures("scarce")
def test_what_cannot_be_read_again_or_divided_stays() -> None:
    def feeds() -> Iterator[Feed]:
        for start in range(0, SAMPLES, 8):
            yield {"x": DATA["x"][start : start + 8]}

    assert sizes(two_mlps(WIDTH, 48, 32), feeds()) == ([8] * 4, ())
    fixed = tiny(
        "float[8,12] x => float[8,5] y",
        "a = MatMul(x, w1)\nb = Relu(a)\ny = MatMul(b, w2)",
        {"w1": (12, 900), "w2": (900, 5)},
    )
    assert sizes(fixed, DATA) == ([8] * 4, ())


def test_usual_activations_leave_the_batch_size() -> None:
    assert sizes(two_mlps(WIDTH, 48, 32), DATA) == ([8] * 4, ())
