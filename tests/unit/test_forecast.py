"""The prediction of what a run takes, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail.calibration.prepare import prepare
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import EXPECTED
from onnxgrail.narrowing.forecast.expected import Expected, expected
from onnxgrail.narrowing.forecast.speed import Speed
from onnxgrail.narrowing.forecast.work import Work, fits_of, of_run
from onnxgrail.recipe.check import recipe_of
from tests.tiny import mlp

ROWS = 96


def rows(count: int = ROWS) -> dict[str, Any]:
    """Return calibration data of the tiny MLP."""
    return {"x": np.random.default_rng(0).standard_normal((count, 5)).astype(np.float32)}


def work_of(count: int = ROWS, **choices: Any) -> Work:
    """Return the work of a run of a tiny MLP of one block, of width 8."""
    recipe = recipe_of({"unit_ratio": 0.5, "round_to": 1, **choices})
    prepared = prepare(mlp(1), rows(count), Job(recipe=recipe), 0)
    blocks = [block for block in prepared.survey.blocks if block.kind == "mlp"]
    stages = fits_of(prepared, recipe, {block.name: block.units // 2 for block in blocks})
    return of_run(prepared, recipe, dict.fromkeys(blocks, 0.5), stages)


def test_operations_of_grail_are_those_of_its_formulas() -> None:
    found = work_of(compensate="grail", selector="wanda")
    width, kept, outputs = 8, 4, 6
    gram = ROWS * width**2  # half of two operations per product
    products = (2 * kept * kept + kept**2 + kept**2) * outputs
    assert found.passes == 1.0
    assert found.sums == pytest.approx(gram + products)
    assert found.solves == pytest.approx(kept**3 / 3 + 2 * kept**2 * outputs)
    assert found.moved == ROWS * width
    assert found.steps == 1.0


def test_a_run_that_reads_no_activations_passes_none() -> None:
    assert work_of(compensate="none", selector="l2") == Work()


def test_more_rows_are_more_sums_and_the_same_solves() -> None:
    for compensate in ("grail", "best"):
        few, many = (work_of(count, compensate=compensate, selector="wanda") for count in (ROWS, 4 * ROWS))
        assert many.sums > few.sums
        assert many.solves == few.solves
        assert many.passes == few.passes


def test_fits_of_best_are_counted_beside_decisions() -> None:
    grail, best = (work_of(compensate=name, selector="wanda") for name in ("grail", "best"))
    assert (best.passes, grail.passes) == (2.0, 1.0)
    assert best.steps > grail.steps
    assert best.solves > grail.solves


def test_seconds_are_those_of_all_parts_together() -> None:
    speed = Speed(product=1e9, passing=2.0, fixed=0.5)
    parts = [Work(passes=1.0), Work(sums=1e9), Work(solves=1e9), Work(moved=1e6), Work(steps=3.0)]
    assert speed.seconds(Work()) == 0.5
    assert speed.seconds(sum(parts, Work())) - 0.5 == pytest.approx(sum(speed.seconds(part) - 0.5 for part in parts))
    assert speed.seconds(parts[0] * 3.0) - 0.5 == pytest.approx(3 * (speed.seconds(parts[0]) - 0.5))


def test_a_dry_run_tells_it_before_anything_is_measured(tmp_path: Path) -> None:
    told: list[str] = []

    def progress(stage: str, *_: int) -> None:
        told.append(stage)

    choices: dict[str, Any] = {"unit_ratio": 0.5, "compensate": "grail", "held_out": 0, "progress": progress}
    run = onnxgrail.compress(mlp(3, 512), data=rows(), dry_run=True, **choices)
    (text,) = (stage for stage in told if stage.startswith(EXPECTED))
    assert told.index(text) < told.index("prove") < told.index("calibrate")
    found, model = run.report.data["expected"], run.report.data["model"]
    assert text == EXPECTED + Expected(**found).told
    assert 0 < found["seconds"] < 60
    assert found["memory"] > 1e7
    assert found["disk"] == pytest.approx(model["bytes_after"], rel=0.1)
    plain = onnxgrail.compress(mlp(3, 512), tmp_path / "o.onnx", data=rows(), **choices)
    assert plain.report.data["expected"] is None
    assert sum(stage.startswith(EXPECTED) for stage in told) == 1


def test_activations_beyond_the_budget_are_on_the_disk() -> None:
    found = {}
    for budget in ("1G", "10K"):
        job = Job(recipe=recipe_of({"unit_ratio": 0.5, "compensate": "grail", "cache_budget": budget}))
        found[budget] = expected(prepare(mlp(3, 64), rows(4096), job, 0), job)
    largest = 4 * 4096 * 64
    assert found["10K"].disk - found["1G"].disk == pytest.approx(1.3 * largest - 10 * 1024, rel=0.01)


def test_a_search_takes_longer_than_a_run_at_given_widths() -> None:
    taken = {}
    for name, value in (("unit_ratio", 0.1), ("max_loss", 0.01)):
        job = Job(recipe=recipe_of({name: value}))
        taken[name] = expected(prepare(mlp(3, 64), rows(), job, 32), job).seconds
    assert taken["max_loss"] > taken["unit_ratio"]


@pytest.mark.parametrize(
    ("amounts", "told"),
    [
        ((31.2, 1_230_000_000, 172_000_000), "about 31 s, 1.23 GB of memory and 172 MB on disk"),
        ((240.0, 200_000_000, 81_000), "about 4 min, 200 MB of memory and 81 kB on disk"),
        ((9000.0, 2_000_000_000, 4_300_000_000), "about 2.5 h, 2 GB of memory and 4.3 GB on disk"),
    ],
)
def test_amounts_are_told_in_units_that_people_read(amounts: tuple[float, int, int], told: str) -> None:
    seconds, memory, disk = amounts
    assert Expected(seconds=seconds, memory=memory, disk=disk).told == told
