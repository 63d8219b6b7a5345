"""Pages in a browser: phone and desk, light and dark.  Needs playwright and Chromium, and says so where they lack.

ONNXGRAIL_BROWSER names the browser's program; ONNXGRAIL_ARTIFACTS a folder where screenshots stay.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from onnxgrail import models
from onnxgrail.cli import main
from onnxgrail.page import inspection_page, report_page
from tests.page_data import encoder, inspection

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
DIGITS = models.load("digits_resnet")
LONG = "a" * 300
PAGES = ("minilm", "curves", "digits", "inspection", "long names", "300 blocks")
CONTRAST = 4.5
MEASURE = """() => {
  const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const parse = s => { const c = s.match(/[\\d.]+/g).map(Number); return c.length > 3 && c[3] === 0 ? null : c; };
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || e.closest("script, svg")) continue;
    let behind = e, ground = null;
    while (behind && !(ground = parse(getComputedStyle(behind).backgroundColor))) behind = behind.parentElement;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), walk.currentNode.data.trim()]);
  }
  return found;
}"""


def program() -> str | None:
    named = os.environ.get("ONNXGRAIL_BROWSER")
    return named or next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = program()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is on the path, and ONNXGRAIL_BROWSER names none")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages; they stay beside their screenshots where a folder is named for these."""
    kept = os.environ.get("ONNXGRAIL_ARTIFACTS")
    place = Path(kept) if kept else tmp_path_factory.mktemp("pages")
    place.mkdir(parents=True, exist_ok=True)
    long = encoder(3, curves=True)
    for block in (*long["blocks"], *long["allocation"]["curves"]):
        for key in {"name", "block"} & set(block):
            block[key] += LONG
    for refusal in long["refusals"]:
        refusal |= {"node": LONG, "reason": LONG}
    long["model"] |= {"input": f"{LONG}/{LONG}.onnx"}
    long["verification"]["outputs"][0]["name"] = LONG
    made = {
        "minilm": report_page(encoder()),
        "curves": report_page(encoder(curves=True)),
        "inspection": inspection_page(inspection()),
        "long names": report_page(long),
        "300 blocks": report_page(encoder(150)),
    }
    for name, text in made.items():
        (place / f"{name}.html").write_text(text, encoding="utf-8")
    words = ["compress", DIGITS.model, place / "digits.onnx", "--force", "--data", DIGITS.calibration]
    result = CliRunner().invoke(main, [*map(str, words), "--report", str(place / "digits.html")])
    assert result.exit_code == 0, result.output
    return place


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(browser: Any, folder: Path, name: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folder / f"{name}.html").as_uri())
    page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=name != "300 blocks")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unreadable = [(round(ratio, 2), text) for ratio, text in page.evaluate(MEASURE) if ratio < CONTRAST]
    assert unreadable == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "an opened list is too wide"
    assert wrong == []
    assert len(asked) == 1
    context.close()


def test_keys_reach_everything(browser: Any, folder: Path) -> None:
    page = browser.new_page()
    page.goto((folder / "curves.html").as_uri())
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        box = page.evaluate(
            "(e => { const b = e.getBoundingClientRect(), s = getComputedStyle(e);"
            "return [e.tagName, e.textContent, b.left >= 0 && b.width > 0, s.outlineStyle]; })(document.activeElement)"
        )
        if box[0] == "BODY":
            break
        assert box[2], f"{box[1]!r} has the focus and cannot be seen"
        assert box[3] != "none", f"{box[1]!r} does not show that it has the focus"
        seen.append(box[0])
    assert seen[0] == "A"
    assert {"A", "DIV", "PRE", "SUMMARY", "BUTTON"} == set(seen)
    page.close()


def test_the_command_can_be_copied(browser: Any, folder: Path) -> None:
    page = browser.new_page()
    page.goto((folder / "minilm.html").as_uri())
    page.click("button[data-copy=command]")
    page.wait_for_function("/Copied|Selected/.test(document.querySelector('button[data-copy=command]').textContent)")
    page.close()
