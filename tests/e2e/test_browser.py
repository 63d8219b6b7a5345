"""Pages in a browser: phone and desk, light and dark.  Skipped only where there is no Chromium.

ONNXGRAIL_BROWSER names the browser's program; pages and screenshots stay in build/screenshots, or in the folder that
ONNXGRAIL_ARTIFACTS names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrail.report.page import inspection_page, pair_page, report_page
from tests.command import run
from tests.page_data import encoder, inspection
from tests.shorter import shorter
from tests.tiny import two_mlps
from tests.unit.test_page import EVIL, evil

from . import minilm

SCREENS = {390: ("light", "dark"), 1440: ("dark", "light")}  # the first scheme of each width stays as a picture
NARROWEST = 320
PHONE = {"width": 390, "height": 844}
SUMMARY = 8 * 844  # pixels of a phone that a page takes at most before a section is opened
NAMED = {"image", "figure", "table", "searchbox", "combobox", "navigation", "region"}  # roles that need a name
TORN = """() => [...document.querySelectorAll(".plain tbody th")].flatMap(th => {
  const walk = document.createTreeWalker(th, NodeFilter.SHOW_TEXT), torn = [];
  while (walk.nextNode()) for (const word of walk.currentNode.data.matchAll(/\\p{L}{2,12}/gu)) {
    const range = document.createRange();
    range.setStart(walk.currentNode, word.index);
    range.setEnd(walk.currentNode, word.index + word[0].length);
    if (range.getClientRects().length > 1) torn.push(word[0]);
  }
  return torn;
})"""
CELLS = """() => [...document.querySelectorAll(".verdicts td .sub")].filter(sub => sub.textContent).map(sub => {
  const cell = sub.parentElement.getBoundingClientRect(), own = sub.getBoundingClientRect();
  const text = document.createRange();
  text.selectNodeContents(sub.parentElement);
  text.setEndBefore(sub);
  return [Math.round(cell.right - own.right), text.getBoundingClientRect().bottom <= own.top + 4];
})"""
LONG = "a" * 300
LARGEST = 1_000_000  # bytes of a page
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


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the folder for pages and screenshots, which are artifacts of the run."""
    place = Path(os.environ.get("ONNXGRAIL_ARTIFACTS") or Path(__file__).parents[2] / "build" / "screenshots")
    place.mkdir(parents=True, exist_ok=True)
    return place


# ---------------------------------------------------------------------------------------------------------- the pages


def compressed(page: Path, model: Path, data: Path, *words: object) -> None:
    """A page as the command line writes it."""
    common = ("compress", model, model.with_name("small.onnx"), "--ratio=0.3", "--data", data)
    result = run(*common, "--report", page, "--force", *words)
    assert result.exit_code == 0, result.output


def of_minilm(page: Path, scratch: Path) -> None:
    onnx.save(minilm.minilm(), scratch / "minilm.onnx")
    np.savez(scratch / "sentences.npz", **minilm.sentences())
    compressed(page, scratch / "minilm.onnx", scratch / "sentences.npz", "--compensate", "grail", "--held-out", "4")


def of_digits(page: Path, scratch: Path) -> None:
    digits = shorter("digits_resnet", scratch)
    with np.load(digits.heldout) as file:
        np.savez(scratch / "few.npz", **{key: file[key][:64] for key in file.files})
    words = ("--held-out", scratch / "few.npz", "--samples=32", "--curves", "--quantize=int8", "--target=tensorrt")
    compressed(page, digits.model, digits.calibration, *words)


def of_frontier(page: Path, scratch: Path) -> None:
    onnx.save(ir.to_proto(two_mlps(12, 48, 32)), scratch / "m.onnx")
    np.savez(scratch / "x.npz", x=np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32))
    words = ("--points=3", "--round-to=1", "--minimize=params", "--force")
    result = run("frontier", scratch / "m.onnx", "--data", scratch / "x.npz", "--report", page, *words)
    assert result.exit_code == 0, result.output


def with_long_names() -> dict[str, Any]:
    long = encoder(3, curves=True)
    for block in (*long["blocks"], *long["allocation"]["curves"]):
        for key in {"name", "block"} & set(block):
            block[key] += LONG
    for refusal in long["refusals"]:
        refusal |= {"node": LONG, "reason": LONG}
    long["model"] |= {"input": f"{LONG}/{LONG}.onnx"}
    long["verification"]["outputs"][0]["name"] = LONG
    return long


DRAWN: dict[str, Callable[[], str]] = {
    "encoder": lambda: report_page(encoder()),
    "curves": lambda: report_page(encoder(curves=True)),
    "inspection": lambda: inspection_page(inspection()),
    "long names": lambda: report_page(with_long_names()),
    "300 blocks": lambda: report_page(encoder(150)),
    "two reports": lambda: pair_page(encoder(), with_long_names()),
}
MADE: dict[str, Callable[[Path, Path], None]] = {"minilm": of_minilm, "digits": of_digits, "frontier": of_frontier}


def page_of(name: str, folder: Path, scratch: Path) -> Path:
    """The file of a page: one that a run makes, or one drawn from made-up data."""
    page = folder / f"{name}.html"
    if name in MADE:
        MADE[name](page, scratch)
    else:
        page.write_text(DRAWN[name](), encoding="utf-8")
    return page


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", [*MADE, *DRAWN])
def test_it_fits_and_can_be_read(browser: Any, folder: Path, name: str, tmp_path: Path) -> None:
    file = page_of(name, folder, tmp_path)
    assert file.stat().st_size <= LARGEST
    for width, schemes in SCREENS.items():
        looked_at(browser, file, width, schemes, folder / f"{name}-{width}-{schemes[0]}.png")


def looked_at(browser: Any, file: Path, width: int, schemes: Sequence[str], picture: Path) -> None:
    """A page on a screen: nothing sticks out, the console is silent, nothing is fetched, both schemes are legible."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=schemes[0])
    page = context.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.screenshot(path=picture, full_page=page.evaluate("document.documentElement.scrollHeight") < 16_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, picture.name
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        unreadable = [(round(ratio, 2), text) for ratio, text in page.evaluate(MEASURE) if ratio < CONTRAST]
        assert unreadable == [], (picture.name, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{picture.name}: an opened list is too wide"
    assert wrong == [], picture.name
    assert len(asked) == 1, picture.name
    context.close()


@pytest.mark.parametrize("name", ["curves", "inspection", "frontier"])
def test_the_narrowest_phone_tears_no_words(browser: Any, tmp_path: Path, name: str) -> None:
    page = browser.new_page(viewport={"width": NARROWEST, "height": 640})
    page.goto(page_of(name, tmp_path, tmp_path).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROWEST
    assert page.evaluate(TORN) == []
    page.close()


@pytest.mark.parametrize("name", ["curves", "two reports"])
def test_a_phone_shows_bars_and_puts_further_measures_below_a_value(browser: Any, tmp_path: Path, name: str) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto(page_of(name, tmp_path, tmp_path).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    widths = page.evaluate("[...document.querySelectorAll('.bars td svg')].map(b => b.getBoundingClientRect().width)")
    assert all(width > PHONE["width"] / 2 for width in widths)
    cells = page.evaluate(CELLS)
    assert cells == [[0, True]] * len(cells)
    assert widths or cells
    page.close()


def test_keys_reach_everything(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(page_of("curves", tmp_path, tmp_path).as_uri())
    seen = []
    for _ in range(60):
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
    assert {"A", "DIV", "PRE", "SUMMARY", "BUTTON", "INPUT", "SELECT"} == set(seen)
    page.close()


def test_the_command_can_be_copied(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(page_of("encoder", tmp_path, tmp_path).as_uri())
    page.click("button[data-copy=command]")
    page.wait_for_function("/Copied|Selected/.test(document.querySelector('button[data-copy=command]').textContent)")
    page.close()


def names(page: Any, body: str = "network-rows") -> list[str]:
    """Return the blocks that a table shows, in its order."""
    shown = f"#{body} tr[data-name]"
    return [str(row.get_attribute("data-name")) for row in page.locator(shown).all() if row.is_visible()]


def test_blocks_are_searched_filtered_and_ordered(browser: Any, tmp_path: Path) -> None:
    data = encoder(12)
    page = browser.new_page()
    (tmp_path / "p.html").write_text(report_page(data), encoding="utf-8")
    page.goto((tmp_path / "p.html").as_uri())
    network = [one["name"] for one in data["blocks"]]
    assert names(page) == network
    page.fill(".controls input", "LAYER.1.")
    assert names(page) == [name for name in network if "layer.1." in name]
    assert page.inner_text(".controls p") == "2 of 48 rows"
    page.fill(".controls input", "")
    page.get_by_label("Kind").select_option("MLP")
    assert names(page) == [name for name in network if name.endswith("mlp")]
    page.get_by_label("Sort by").select_option("error")
    errors = {one["name"]: one["error"]["compensated"] for one in data["blocks"]}
    assert names(page) == sorted((n for n in network if n.endswith("mlp")), key=lambda n: -errors[n])
    page.get_by_label("Kind").select_option("")
    page.get_by_label("Sort by").select_option("name")
    assert names(page)[:5] == [f"bert.encoder.layer.{n}" for n in ("0.heads", "0.mlp", "1.heads", "1.mlp", "2.heads")]
    page.get_by_label("Sort by").select_option("")
    assert names(page) == network
    page.get_by_label("Kind").select_option("left alone")
    assert names(page) == []
    assert page.inner_text(".controls p") == "24 of 48 rows"
    page.close()


def test_a_click_or_a_key_on_a_block_shows_its_nodes(browser: Any, tmp_path: Path) -> None:
    data = encoder(2)
    data["blocks"][0] |= {"nodes": ["/layer/0/query/MatMul"]}
    (tmp_path / "p.html").write_text(report_page(data), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "p.html").as_uri())
    node = page.get_by_text("/layer/0/query/MatMul")
    assert not node.is_visible()
    page.locator("#network-rows summary").first.click()
    assert node.is_visible()
    page.locator("#network-rows summary").first.press("Enter")
    assert not node.is_visible()
    page.close()


@pytest.mark.parametrize("name", ["300 blocks", "curves", "two reports"])
def test_a_phone_shows_the_summary_first(browser: Any, tmp_path: Path, name: str) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto(page_of(name, tmp_path, tmp_path).as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") <= SUMMARY
    fold = page.locator("section:has(.controls) > details")
    assert not fold.locator("table").first.is_visible()
    page.locator("nav a", has_text=re.compile("lock")).first.click()
    assert fold.locator("table").first.is_visible()
    page.close()


def test_paper_breaks_no_value_and_has_the_cards_in_one_row(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 560, "height": 800})
    page.goto(page_of("curves", tmp_path, tmp_path).as_uri())
    page.emulate_media(media="print")
    tops = page.evaluate("[...document.querySelectorAll('.card')].map(c => c.getBoundingClientRect().top)")
    assert len(tops) == 4
    assert len(set(tops)) == 1
    lines = "[...document.querySelectorAll('.verdicts .option')].map(v => v.getClientRects().length)"
    assert set(page.evaluate(lines)) == {1}
    page.close()


def test_paper_is_light_and_shows_all_sections(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport=PHONE, color_scheme="dark")
    page.goto(page_of("curves", tmp_path, tmp_path).as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#network-rows tr").first.is_visible()
    assert not page.locator("nav").is_visible()
    assert [text for ratio, text in page.evaluate(MEASURE) if ratio < CONTRAST] == []
    page.close()


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path) -> None:
    hostile = evil(encoder(3)), evil(encoder(2))
    for number, text in enumerate((report_page(hostile[0]), pair_page(*hostile))):
        file = tmp_path / f"{number}.html"
        file.write_text(text, encoding="utf-8")
        page = browser.new_page()
        asked: list[str] = []
        shown: list[str] = []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.on("dialog", lambda dialog, shown=shown: shown.append(dialog.message))
        page.goto(file.as_uri())
        page.fill(".controls input", EVIL)
        page.get_by_label("Sort by").select_option("name")
        assert (asked, shown) == ([file.as_uri()], [])
        page.close()


@pytest.mark.parametrize("name", ["curves", "inspection", "two reports"])
def test_figures_tables_and_controls_have_names(browser: Any, tmp_path: Path, name: str) -> None:
    page = browser.new_page()
    page.goto(page_of(name, tmp_path, tmp_path).as_uri())
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    shown = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    assert {role for role, _ in shown} >= NAMED
    assert [role for role, said in shown if role in NAMED and not said.strip()] == []
    page.close()
