"""Contents of a report beside the sizes: fidelity on samples that nothing was fitted to, times, error curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.feeds.batches import ENOUGH
from onnxgrail.calibration.feeds.held_out import LEAST
from onnxgrail.errors import DataError, UsageError
from onnxgrail.narrowing import widths
from tests.command import run

from . import nets

COMMON = {"unit_ratio": 0.3, "compensate": "grail", "dry_run": True}


def compressed(**options: Any) -> dict[str, Any]:
    """The report of a run on 100 samples."""
    given: dict[str, Any] = {"data": nets.vectors(), **COMMON, **options}
    return dict(onnxgrail.compress(nets.mlp(), **given).report.data)


@pytest.fixture
def folder(folder: Path) -> Path:
    """With data `h.npz` to judge by."""
    np.savez(folder / "h.npz", **nets.vectors(24, seed=9))
    return folder


@pytest.mark.parametrize("count", [1, ENOUGH - LEAST - 1, ENOUGH - LEAST, ENOUGH])
def test_too_few_samples_are_told(count: int, folder: Path) -> None:
    """The eight that are held back count, too: the data hold more than are fitted to."""
    told = f"calibrated on {count} sample{'s' if count > 1 else ''}: what is fitted to so few"
    few = count + LEAST < ENOUGH
    assert any(note.startswith(told) for note in compressed(samples=count)["notes"]) is few
    done = run(
        "compress", folder / "m.onnx", "--unit-ratio=0.3", "--data", folder / "d.npz", "--samples", count, "--dry-run"
    )
    assert (f"Warning: {told}" in done.stderr) is few
    alone = [note for note in compressed(samples=count, held_out=0)["notes"] if note.startswith(told)]
    assert bool(alone) is (count < ENOUGH)
    assert all("the check on calibration samples does not show it" in note for note in alone)
    plain = compressed(samples=count, selector="l2", compensate="none")
    assert plain["notes"] == [], "the data were not used"
    assert "calibrated on" not in "".join(compressed(data=None, samples=count)["notes"]), "drawn inputs cost more"


@pytest.mark.parametrize("count", [ENOUGH // 2, ENOUGH])
def test_what_is_fitted_to_few_samples_is_far_off_on_others(count: int) -> None:
    entry = models.load("digits_vit")
    with np.load(entry.calibration) as archive, np.load(entry.heldout) as other:
        data, held = {"images": archive["images"][:count]}, {"images": other["images"][:64]}
    options = {
        "data": data,
        "held_out": held,
        "unit_ratio": 0.4,
        "dry_run": True,
        "closed_loop": True,
        "selector": "wanda",
    }
    plain, fitted = (
        onnxgrail.compress(entry.model, compensate=how, **options).report.data["verification"]["held_out"]["outputs"][0]
        for how in ("none", "grail")
    )
    assert (fitted["cosine"] > plain["cosine"]) is (count >= ENOUGH)


def test_a_number_is_held_back() -> None:
    data = compressed(held_out=20)
    held = data["verification"]["held_out"]
    assert data["calibration"]["samples"] == 80
    assert (held["asked"], held["source"], held["samples"]) == ("20", "arrays", 20)
    assert [(o["name"], o["samples"]) for o in held["outputs"]] == [("y", 20)]
    assert -1 <= held["outputs"][0]["cosine_min"] < held["outputs"][0]["cosine"] < 1


def test_with_samples_those_held_back_are_others() -> None:
    data = compressed(samples=30, held_out="20")  # as the command line says it
    assert data["calibration"]["samples"] == 30
    assert data["verification"]["held_out"]["samples"] == 20


def test_data_of_their_own_leave_the_result_alone() -> None:
    other = nets.vectors(24, seed=9)
    alone, judged = (onnxgrail.compress(nets.mlp(), data=nets.vectors(), held_out=h, **COMMON) for h in (0, other))
    assert alone.to_bytes() == judged.to_bytes()
    assert alone.report.data["verification"]["held_out"] is None
    held = judged.report.data["verification"]["held_out"]
    assert held["outputs"][0]["nmse"] == pytest.approx(distance(judged.to_bytes(), other), rel=1e-4)


def distance(slim: bytes, feed: nets.Arrays) -> float:
    """Squared error over energy, from the weights alone."""
    wanted, got = (
        nets.run_mlp(nets.weights_of(model), feed)["y"] for model in (nets.mlp(), onnx.ModelProto.FromString(slim))
    )
    return float(((got - wanted) ** 2).sum() / (wanted**2).sum())


def test_the_gate_judges_held_out_samples(folder: Path) -> None:
    """Calibration samples are fitted closely; those held out are of another kind, and do not come close."""
    other = {"x": np.random.default_rng(0).standard_normal((24, 12)).astype(np.float32) * 9}
    np.savez(folder / "h.npz", **other)
    common = ("compress", folder / "m.onnx", "--data", folder / "d.npz", "--samples", 16, "--unit-ratio", 0.5)
    cosines = []
    for judges in (0, folder / "h.npz"):
        free = run(*common, "--dry-run", "--held-out", judges, "--report", folder / "r.json", "--force")
        assert free.exit_code == 0, free.output
        data = json.loads((folder / "r.json").read_text())["verification"]
        cosines.append(data["outputs"][0]["cosine"])
    seen, held = cosines
    assert held < seen
    assert data["held_out"]["outputs"] == data["outputs"]
    limit = (held + seen) / 2
    assert run(*common, "--dry-run", "--min-cosine", limit, "--held-out", 0).exit_code == 0
    result = run(*common, "--dry-run", "--min-cosine", limit, "--held-out", folder / "h.npz")
    assert result.exit_code == 3
    assert f"cosine {held:.5f} of output 'y' is below" in result.stderr
    assert "on 24 held-out samples" in result.stdout


def test_a_quantised_model_is_judged_on_them_too() -> None:
    data = compressed(held_out=20, quantize="fp16", dry_run=True)
    assert data["quantization"]["held_out"]["samples"] == 20
    assert [o["samples"] for o in data["quantization"]["held_out"]["outputs"]] == [20]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"held_out": 100}, DataError, "100 samples are to be held out and 100 are there"),
        ({"held_out": 5, "data": None}, UsageError, "--held-out 5 needs --data"),
        ({"held_out": -1}, UsageError, "0 or more"),
        ({"held_out": True}, UsageError, "a number of samples"),
        ({"held_out": {"x": np.ones((2, 5), np.float32)}}, DataError, "12"),
        ({"held_out": "no such file"}, DataError, "no such file"),
    ],
)
def test_what_cannot_be_held_out(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        compressed(**options)
    assert said in str(caught.value)


def test_real_samples_judge_what_drawn_ones_calibrated() -> None:
    data = compressed(data=None, held_out=nets.vectors())
    assert data["calibration"]["synthetic"]
    assert data["verification"]["held_out"]["samples"] == 100


def test_ready_feeds_are_held_back_whole() -> None:
    feeds = [{"x": nets.vectors(4, seed=k)["x"]} for k in range(10)]
    data = compressed(data=feeds, held_out=6)
    assert data["calibration"]["samples"] == 32
    assert data["verification"]["held_out"]["samples"] == 8


@pytest.mark.parametrize("held", ["20", "h.npz"])
def test_a_saved_recipe_names_them_and_a_report_does_not(held: str, folder: Path) -> None:
    held = held if held.isdecimal() else str(folder / held)
    words = ("--data", folder / "d.npz", "--held-out", held, "--save-recipe", folder / "r.yaml")
    reported = ("--report", folder / "first.json", "--report", folder / "page.html")
    first = run("compress", folder / "m.onnx", folder / "a.onnx", "--unit-ratio=0.3", *words, *reported)
    assert first.exit_code == 0, first.output
    for source in ("r.yaml", "first.json"):
        again = folder / "again.json"
        given = () if source == "r.yaml" else words[:4]  # a report names no files
        target = (folder / "m.onnx", folder / "b.onnx", "--force")
        result = run("apply", folder / source, *target, "--report", again, *given)
        assert result.exit_code == 0, result.output
        entries = [json.loads(path.read_text())["verification"]["held_out"] for path in (folder / "first.json", again)]
        assert entries[0] == entries[1]
        assert entries[0]["asked"] == held
    assert f"--held-out {held}" in (folder / "page.html").read_text()


# ------------------------------------------------------------------------------------------------- times and curves


def test_models_are_timed_for_a_page(folder: Path) -> None:
    found = {}
    for name, words in {"json": (), "asked": ("--latency",), "html": ("--report", folder / "r.html")}.items():
        report = folder / f"{name}.json"
        common = (
            "compress",
            folder / "m.onnx",
            folder / "o.onnx",
            "--unit-ratio=0.3",
            "--force",
            "--data",
            folder / "d.npz",
        )
        result = run(*common, "--report", report, *words)
        assert result.exit_code == 0, result.output
        found[name] = json.loads(report.read_text())["latency"]
        assert ("Latency of one run: original" in result.stdout) == (name != "json")
    assert found["json"] is None
    for steps in (found["asked"], found["html"]):
        assert [step["name"] for step in steps] == ["original", "narrowed"]
        assert all(step["median"] > 0 for step in steps)
        assert steps[0]["ratio"] is None
        assert steps[1]["interval"][0] <= steps[1]["ratio"] <= steps[1]["interval"][1]
    assert "Median time of one run" in (folder / "r.html").read_text()


def test_curves_are_measured_for_a_page_of_a_small_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, report = folder / "r.html", folder / "r.json"
    common = (
        "compress",
        folder / "m.onnx",
        "--unit-ratio=0.3",
        "--dry-run",
        "--data",
        folder / "d.npz",
        "--force",
        "--report",
        report,
    )

    def has(*words: object) -> bool:
        assert run(*common, *words).exit_code == 0
        return bool(json.loads(report.read_text())["allocation"]["curves"])

    assert has("--report", page)
    assert "Error over width" in page.read_text()
    assert (has(), has("--curves"), has("--report", page, "--no-curves")) == (False, True, False)
    for few in ((0, 1e12), (64, 0)):  # too many blocks; too large a model
        monkeypatch.setattr(widths, "CHEAP", few)
        assert not has("--report", page)
        assert has("--report", page, "--curves")


def test_curves_change_nothing_but_the_report() -> None:
    plain, measured = (onnxgrail.compress(nets.mlp(), data=nets.vectors(), curves=c, **COMMON) for c in (False, True))
    assert plain.to_bytes() == measured.to_bytes()
    assert plain.report.data["allocation"]["curves"] == []
    curves = measured.report.data["allocation"]["curves"]
    assert [curve["block"] for curve in curves] == [block["name"] for block in measured.report.data["blocks"]]
    for curve in curves:
        assert curve["points"][0] == [0, 1.0]
        assert curve["points"][-1] == [curve["units"], 0.0]
        assert curve["effect"] > 0
    assert "Error over width" in measured.report.to_html()
