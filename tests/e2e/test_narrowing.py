"""The page and the picture of narrowing and repair: written by their script, measured again, shown in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import narrowing
from tests.test_pages import script

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURE = DOCS / "narrowing.html", DOCS / "img" / "narrowing.svg"
WRITER = script(DOCS / "narrowing_page.py")
FIGURES = json.loads(WRITER.RESULTS.read_text(encoding="utf-8"))
NAMES = """() => [...document.querySelectorAll("svg[role=img], input, table, section, ul.channels")].filter(e =>
  !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.labels?.length || e.querySelector("caption"))
).map(e => e.outerHTML.slice(0, 80))"""


def test_the_files_are_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == WRITER.page(FIGURES), "run `python docs/narrowing_page.py`"
    assert PICTURE.read_text(encoding="utf-8") == WRITER.picture(FIGURES), "run `python docs/narrowing_page.py`"


def test_the_figures_can_be_repeated() -> None:
    widths = [20, 8]
    known = {step["width"]: step for step in FIGURES["steps"]}
    assert sorted(known) == list(range(1, FIGURES["width"]))
    again = narrowing.measure(widths)
    assert again["dense"]["accuracy"] == pytest.approx(FIGURES["dense"]["accuracy"], abs=0.005)
    for step in again["steps"]:
        before = known[step["width"]]
        assert len(set(step["kept"]) & set(before["kept"])) >= step["width"] - 1  # processors round differently
        for way in narrowing.WAYS:
            assert step[way]["error"] == pytest.approx(before[way]["error"], abs=0.02), (step["width"], way)
            assert step[way]["accuracy"] == pytest.approx(before[way]["accuracy"], abs=0.03), (step["width"], way)


@pytest.mark.parametrize("path", [PAGE, PICTURE], ids=["page", "picture"])
def test_nothing_is_requested(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//\w|@import|url\(|<(?:link|img|iframe|object|use)\b|\bfetch\(|\bsrc=", text)
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(scheme: str, browser: Any) -> None:
    shown = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    asked: list[str] = []
    said: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.goto(PAGE.as_uri())
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.evaluate(NAMES) == []
    shown.focus("#gone")
    shown.keyboard.press("Home")
    assert shown.locator(".channels .gone").count() == 0
    for _ in range(8):
        shown.keyboard.press("ArrowRight")
    assert shown.locator(".channels .gone").count() == 8
    step = next(step for step in FIGURES["steps"] if step["width"] == FIGURES["width"] - 8)
    for row, way in enumerate(WRITER.WAYS):
        told = shown.locator("#now tbody tr").nth(row).locator("td").all_inner_texts()
        assert told[1] == WRITER.cells(step[way])[1]
    assert (asked, said) == ([PAGE.as_uri()], [])
    shown.close()
