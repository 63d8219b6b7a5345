"""A report of which any part is missing or something else is told so in one line, whatever is asked of it."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail import OnnxGrailError, Report
from onnxgrail.cli.compress import notes
from onnxgrail.cli.compress import show as tables
from tests.e2e import nets

DROP = object()
ODD = (None, True, -1.5, 1e400, 10**400, "x", "<b>", [], {}, [None], {"a": [1]})
SHOWN = (repr, Report._repr_html_)
ASKED = (
    Report.summary_rows,
    Report.headline,
    Report.asked_lines,
    Report.output_lines,
    Report.speed,
    Report.refusal_counts,
    Report.outcome_counts,
    lambda report: report.beside(report).tables(),
    lambda report: report.beside(report).notes(),
)


def _printed(report: Report) -> None:
    """Print a report as `onnxgrail report` does."""
    with report.reading(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        notes(report.data)
        tables(report, report.data["model"]["output"])


SLOW = (Report.to_json, Report.to_html, lambda report: report.beside(report).to_html(), _printed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real report, of whose lists the first two parts stay."""
    place = tmp_path_factory.mktemp("report")
    onnx.save(nets.mlp(), place / "m.onnx")
    np.savez(place / "d.npz", x=np.random.default_rng(0).normal(size=(48, 12)).astype(np.float32))
    made = onnxgrail.compress(
        place / "m.onnx", place / "o.onnx", data=place / "d.npz", unit_ratio=0.3, latency=True, quantize="int8-dynamic"
    )
    found: dict[str, Any] = _short(json.loads(made.report.to_json()))
    return found


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items()}
    return [_short(part) for part in value[:2]] if isinstance(value, list) else value


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*above, key)
        yield from _places(part, (*above, key))


def _changed(data: dict[str, Any], place: tuple[Any, ...], value: Any) -> str:
    found: Any = copy.deepcopy(data)
    part = found
    for key in place[:-1]:
        part = part[key]
    if value is DROP:
        del part[place[-1]]
    else:
        part[place[-1]] = value
    return json.dumps(found)


def _ask(text: str, *, slow: bool) -> int:
    """Ask for everything; return how often the answer was that the report is damaged."""
    try:
        report = Report.from_json(text)
    except OnnxGrailError:
        return 1
    for show in SHOWN:  # a notebook and a debugger show even what is damaged
        assert isinstance(show(report), str)
    told = 0
    for ask in (*ASKED, *(SLOW if slow else ())):
        try:
            ask(report)
        except OnnxGrailError:
            told += 1
    return told


def test_every_part_may_be_missing_or_odd(whole: dict[str, Any]) -> None:
    places, told = list(_places(whole)), 0
    assert len(places) > 200
    assert _ask(json.dumps(whole), slow=True) == 0
    for number, (place, value) in enumerate(zip(places, itertools.cycle(ODD), strict=False)):
        told += _ask(_changed(whole, place, DROP), slow=number % 4 == 0)
        told += _ask(_changed(whole, place, value), slow=False)
    assert told > 50


def test_what_is_shown_of_a_damaged_report(whole: dict[str, Any], tmp_path: Path) -> None:
    report = Report.from_json(_changed(whole, ("model", "params_before"), "<b>"))
    assert repr(report).startswith("the report is damaged: TypeError: ")
    assert repr(report).endswith(". Make it again with --report")
    cut = Report.from_json(_changed(whole, ("blocks", 0, "kind"), ["<b>"]))
    assert "<b>" not in cut._repr_html_()
    with pytest.raises(OnnxGrailError, match="damaged"):
        report.save(tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_names_an_impossible_file_is_written(whole: dict[str, Any], tmp_path: Path) -> None:
    report = Report.from_json(_changed(whole, ("model", "input"), "n" * 300))
    report.save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["model"]["input"] == "n" * 300
