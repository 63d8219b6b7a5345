"""The bench over methods and ratios: it runs, goes on where it stopped, and its page is that of its results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench import equal_params
from bench.fidelity import methods, page, store, summary
from bench.fidelity.__main__ import main
from bench.fidelity.subjects import DEFAULT, SUBJECTS

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("l2/none", "wanda/grail-closed", "onnxsim-l2/none")


def small(folder: Path, *ratios: str, draws: int = 1) -> dict[str, Any]:
    """The results of a run on a tiny grid; no interpreter of that name has onnxsim."""
    out = folder / "results.json"
    options = ["--out", str(out), "--docs", str(folder), "--onnxsim-python", str(folder / "python")]
    grid = ["--models", "digits_vit-mlp-heads", "--draws", str(draws), "--ratios", *ratios, "--methods", *METHODS]
    main([*options, *grid])
    data: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return data


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency of two rounds."""
    monkeypatch.setattr("bench.fidelity.measure.ROUNDS", 2)
    monkeypatch.setattr("bench.fidelity.measure.WARM_UP", 0)


@pytest.mark.usefixtures("quick")
def test_a_small_run_measures_the_grid_once(tmp_path: Path) -> None:
    first = small(tmp_path, "0.7")
    assert [(c["method"], c["ratio"], c["draw"]) for c in first["cells"]] == [
        ("l2/none", 0.7, 0),
        ("wanda/grail-closed", 0.7, 0),
    ]
    plain, repaired = first["cells"]
    dense = first["subjects"]["digits_vit-mlp-heads"]
    assert plain["score"] + 0.1 < repaired["score"] < dense["score"]
    assert plain["params"] == repaired["params"] < 0.5 * dense["params"]
    assert plain["macs"] == repaired["macs"] < 0.5 * dense["macs"]
    assert plain["shape"] == repaired["shape"] == first["latency"][0]["shape"]
    assert len(first["latency"]) == 1
    assert first["skipped"] == ["onnxsim-l2/none"]
    text = (tmp_path / "fidelity.md").read_text(encoding="utf-8")
    assert text == page.page(first)
    assert "`onnxsim-l2/none`" in text

    # Cells that are there stay as they are; a second draw is added only where data are read.
    marked = [cell | {"score": 0.125} for cell in first["cells"]]
    store.save(tmp_path / "results.json", first | {"cells": marked})
    again = small(tmp_path, "0.7", draws=2)
    assert again["cells"][:2] == marked
    assert [(c["method"], c["draw"]) for c in again["cells"][2:]] == [("wanda/grail-closed", 1)]
    assert again["latency"] == first["latency"]


@pytest.mark.usefixtures("quick")
def test_cells_of_another_model_are_forgotten(tmp_path: Path) -> None:
    first = small(tmp_path, "0.7")
    first["subjects"]["digits_vit-mlp-heads"]["sha256"] = "another"
    store.save(tmp_path / "results.json", first | {"cells": [c | {"score": 0.125} for c in first["cells"]]})
    assert [c["score"] for c in small(tmp_path, "0.7")["cells"]] == [c["score"] for c in first["cells"]]


def results(metric: str, *cells: tuple[str, int, float | None]) -> dict[str, Any]:
    rows = [
        {"subject": "s", "method": m, "ratio": 0.5, "draw": d, "score": v, "params": 1, "macs": 1, "shape": "x"}
        for m, d, v in cells
    ]
    return {"subjects": {"s": {"metric": metric}}, "cells": rows}


def test_harm_is_what_the_spread_does_not_explain() -> None:
    draws = [("l1/grail-open", d, v) for d, v in enumerate((0.80, 0.84, 0.86))]
    assert not summary.harm(results("accuracy", ("l1/none", 0, 0.89), *draws), "s", "grail-open").worse
    found = summary.harm(results("accuracy", ("l1/none", 0, 0.91), *draws), "s", "grail-open")
    assert found.worse == (("l1", 0.5, 0.91, 0.84),)
    assert found.pairs == 1


def test_low_perplexity_is_good_and_ruin_is_the_worst() -> None:
    cells = results("perplexity", ("l1/none", 0, 5.0), ("l1/best", 0, None), ("l2/none", 0, 5.0), ("l2/best", 0, 4.0))
    assert summary.harm(cells, "s", "best").worse == (("l1", 0.5, 5.0, math.inf),)


def test_an_unknown_method_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'l3'.*l1/none"):
        methods.chosen(["l3"])
    assert {m.name for m in methods.chosen(["l1", "fold/none"])} >= {"l1/none", "l1/grail-open", "fold/none"}


def test_what_is_missing_altogether_is_one_word() -> None:
    names = [m.name for m in methods.every() if m.base == "obs" or (m.repair == "best" and m.base != "wanda")]
    assert page.grouped(names) == ["obs", *sorted(name for name in names if not name.startswith("obs"))]
    assert page.grouped([*names, "wanda/best"]) == ["obs", "best"]


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "bench/results/fidelity.json").read_text(encoding="utf-8"))
    return data


def test_the_page_is_that_of_the_results(committed: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    assert text == page.page(committed), "run `python -m bench.fidelity --page-only`"


def test_the_results_cover_every_subject_and_ratio(committed: dict[str, Any]) -> None:
    assert set(DEFAULT) <= set(committed["subjects"]) <= set(SUBJECTS)
    for name in DEFAULT:
        assert committed["subjects"][name]["sha256"] == SUBJECTS[name]().sha256, "measured on another model"
        points = summary.series(committed, name)
        for base in ("l1", "l2", "wanda", "fold"):
            for repair in ("none", "grail-open", "grail-closed"):
                assert sorted(points[f"{base}/{repair}"]) == [round(0.1 * step, 1) for step in range(1, 10)]


def test_a_repair_is_worth_something_on_every_subject(committed: dict[str, Any]) -> None:
    for name in DEFAULT:
        points = summary.series(committed, name)
        metric = committed["subjects"][name]["metric"]
        plain, repaired = (
            sum(summary.loss(points[f"wanda/{repair}"][r].score, metric) for r in (0.3, 0.5, 0.7))
            for repair in ("none", "grail-closed")
        )
        assert repaired < plain, name


def test_gradients_halve_what_closed_loop_grail_costs_the_language_model(committed: dict[str, Any]) -> None:
    name = "char_llama-mlp-heads"
    dense, points = committed["subjects"][name]["score"], summary.series(committed, name)
    before, after = (points[f"wanda/{repair}"][0.5].score - dense for repair in ("grail-closed", "laco"))
    assert after <= 0.5 * before
    assert points["wanda/laco"][0.5].seconds > points["wanda/best"][0.5].seconds


def test_slow_methods_are_beside_the_table_with_their_price(committed: dict[str, Any]) -> None:
    names = {m.name for m in methods.further()}
    assert not names & {m.name for m in methods.chosen(None)}
    assert names <= {cell["method"] for cell in committed["cells"]}
    text = page.page(committed)
    assert text.count("| further |") == 3
    point = summary.series(committed, "digits_vit-mlp-heads")["wanda/laco"][0.5]
    assert f"`wanda` laco | {100 * point.score:.1f} (" in text
    assert f", {point.seconds:.0f} s)" in text


def test_the_default_widths_lose_less_than_uniform_ones_at_equal_parameters() -> None:
    rows = json.loads(equal_params.RESULTS.read_text(encoding="utf-8"))["rows"]
    lines = [line for line in equal_params.table(rows).splitlines() if line.startswith("| ")][2:]
    less = [line.split(" | ")[0] for line in lines if not line.split(" | ")[3].startswith("**")]
    assert len(lines) > 12
    assert set(less) <= {"| yunet_n320"}  # ten photos judge, so its two candidates cannot be told apart
