"""The page of a report: whole, valid, escaped, and complete."""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import re
import shlex
from html.parser import HTMLParser
from typing import Any

import pytest

from onnxgrail.report.page import inspection_page, report_page
from onnxgrail.report.page.html import figures
from onnxgrail.report.page.html.markup import Markup, el, escape
from onnxgrail.report.page.network import BlockRow, LeftRow, rows_of
from onnxgrail.report.page.sensitivity import STEPS, _short, heat_step
from onnxgrail.report.summary import KINDS
from tests.cli.standin import data as partial
from tests.page_data import JOINED, block, encoder, inspection, refusal
from tests.verdicts import checked, output, verdict

EMPTY = {"br", "col", "hr", "img", "input", "link", "meta", "wbr"}
EVIL = "</script></title><script>alert(1)</script><img src=x onerror='alert(2)'>\"&\u202e\x00"


class Page(HTMLParser):
    """A parsed page: complains about tags that do not match, keeps text, tags and attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute occurs twice in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and "script" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def held_out(cosine: float = 0.91) -> dict[str, Any]:
    """Return the report entry of 64 samples that nothing was fitted to."""
    output = {"name": "last_hidden_state", "samples": 64, "cosine": cosine, "cosine_min": 0.82, "nmse": 0.17}
    return {"asked": "64", "source": "calib.npz", "samples": 64, "outputs": [output | {"max_abs": 1.8}]}


def variants() -> dict[str, dict[str, Any]]:
    base = encoder()
    sizes = base["model"]
    latency = {"metric": "latency", "asked": "60%", "before": 10.0, "limit": 6.0, "achieved": 5.9}
    untouched = copy.deepcopy(base["blocks"])
    for one in untouched:
        one |= {"kept": one["units"], "error": {"plain": None, "compensated": None, "validation": None}}
        one["outcome"] = {"status": "skipped", "reason": "not selected"}
    norm = {"node": "n", "kind": "repair", "before": 0.2, "after": 0.1, "outcome": {"status": "ok", "reason": ""}}
    refine = {"kind": "laco", "before": 0.2, "after": 0.1, "epochs": 3, "seconds": 4.0, "outcome": {"status": "ok"}}
    return {
        "plain": base,
        "curves": encoder(curves=True),
        "one block": encoder(blocks=base["blocks"][:1]),
        "no block": encoder(blocks=[]),
        "nothing done": encoder(blocks=untouched, verification={}, calibration=None, refits=[], timing={}),
        "dry run": encoder(model=sizes | {"output": None, "sha256_after": None, "bytes_after": None}),
        "held-out": encoder(verification=base["verification"] | {"held_out": held_out()}),
        "latency": encoder(model=sizes | {"asked_ratio": None, "budget": latency}),
        "repairs": encoder(norms=[norm], refines=[refine | {"block": "model"}, refine | {"block": "a"}]),
        "partial": partial(),
    }


@pytest.mark.parametrize("data", [pytest.param(d, id=name) for name, d in variants().items()])
def test_every_kind_of_report_is_a_valid_page(data: dict[str, Any]) -> None:
    page = Page(report_page(data))
    assert "None" not in page.text
    assert "nan" not in page.text
    identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    targets = [attributes["href"] for attributes in page.named("a")]
    assert len(targets) >= 4
    assert {str(target).removeprefix("#") for target in targets} <= set(identities)


def test_it_is_a_function_of_the_data() -> None:
    data = encoder()
    before = json.dumps(data)
    assert report_page(data) == report_page(json.loads(before))
    assert json.dumps(data) == before


def test_all_blocks_and_refusals_stand_in_the_order_of_the_network() -> None:
    text = Page(report_page(encoder(3))).text
    expected = [
        word
        for n in range(3)
        for word in (f"layer.{n}.heads", f"Add node_add_{60 * n + 25}", f"layer.{n}.mlp", f"Add node_add_{60 * n + 55}")
    ]
    start = text.index("From input to output")
    places = [text.index(word, start) for word in expected]
    assert places == sorted(places)
    assert "12 → 8 heads" in text
    assert "67 % left, each 32 wide" in text
    assert "1,536 → 1,072 neurons" in text


def test_refusals_in_a_row_with_one_reason_are_one_row() -> None:
    refusals = [refusal("a", 5), refusal("b", 6), refusal("c", 7, "another"), refusal("d", None)]
    rows = rows_of({"blocks": [block("heads", 1)], "refusals": refusals})
    assert rows[0] == LeftRow(reason=JOINED, nodes=("Add a", "Add b"))
    assert rows[1] == LeftRow(reason="another", nodes=("Add c",))
    assert isinstance(rows[2], BlockRow)
    assert rows[3] == LeftRow(reason=JOINED, nodes=("Add d",))


def test_blocks_of_older_reports_keep_their_order() -> None:
    blocks = [{"name": name, "kind": "conv", "units": 4, "kept": 2} for name in "cab"]
    rows = rows_of({"blocks": blocks, "refusals": [{"value": "v", "node": "", "op": "", "reason": "r"}]})
    assert [row.name for row in rows if isinstance(row, BlockRow)] == ["c", "a", "b"]
    assert rows[-1] == LeftRow(reason="r", nodes=("v",))


def evil(value: Any) -> Any:
    """The same data with something hostile in every text."""
    if isinstance(value, dict):
        return {key: item if key == "metric" else evil(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [evil(item) for item in value]
    return value + EVIL if isinstance(value, str) else value


@pytest.mark.parametrize("data", [pytest.param(d, id=name) for name, d in variants().items()])
def test_no_text_of_a_model_becomes_markup(data: dict[str, Any]) -> None:
    clean, page = Page(report_page(data)), Page(report_page(evil(data)))
    for tag in ("script", "style", "img", "title", "meta", "a"):
        assert len(page.named(tag)) == len(clean.named(tag))
    assert not [attributes for _, attributes in page.tags if any(key.startswith("on") for key in attributes)]
    assert "<script>alert(1)</script>" in page.text  # as words
    assert not {"\u202e", "\x00"} & set(report_page(evil(data)))


def test_no_text_of_an_inspected_model_becomes_markup() -> None:
    page = Page(inspection_page(evil(inspection())))
    assert len(page.named("script")) == 1
    assert page.named("img") == []


def test_elements_escape_what_is_not_markup() -> None:
    assert el("p", "a<b", Markup("<i>c</i>"), None, 3) == "<p>a&lt;b<i>c</i>3</p>"
    assert el("td", class_='"x"', aria_label="a&b", hidden=True, title=None) == (
        '<td class="&quot;x&quot;" aria-label="a&amp;b" hidden></td>'
    )
    assert el("rect", x=1.23456, y=2.0) == '<rect x="1.23" y="2"/>'
    assert escape("é\u00a0\n\ud800\x07") == "é\u00a0\n\ufffd\ufffd"


def test_nothing_is_fetched() -> None:
    source = report_page(encoder(curves=True))
    page = Page(source)
    assert not re.search(r"https?:|url\(|@import|\bsrc=", source)
    assert page.named("link") == page.named("img") == page.named("iframe") == []
    assert not [attributes for _, attributes in page.tags if "style" in attributes]  # the policy would refuse it
    policy = next(str(m["content"]) for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        text = re.findall(rf"<{tag}>(.*?)</{tag}>", source, re.DOTALL)
        assert len(text) == 1
        digest = base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_a_screen_reader_gets_headings_captions_and_labels() -> None:
    page = Page(report_page(encoder(curves=True)))
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(headings))
    assert len(page.named("table")) == len(page.named("caption")) >= 4
    assert all(
        "aria-hidden" in a or a.get("aria-label") or "viewbox" in a or "overflow" in a for a in page.named("svg")
    )
    assert page.named("html") == [{"lang": "en"}]
    assert {"main", "nav", "header", "footer"} <= {tag for tag, _ in page.tags}
    assert all(th.get("scope") for th in page.named("th"))


def test_it_stays_small() -> None:
    assert len(report_page(encoder(6, curves=True)).encode()) < 100_000
    assert len(report_page(encoder(200, curves=True)).encode()) < 1_000_000


def test_sensitivity_is_drawn_from_what_there_is() -> None:
    with_curves, without = (Page(report_page(encoder(2, curves=c))).text for c in (True, False))
    assert "Error over width" in with_curves
    assert "largest 20.0 % in bert.encoder.layer.0.heads" in without
    nothing = Page(report_page(variants()["nothing done"])).text
    assert "Sensitivity" not in nothing
    assert "left at full width: not selected" in nothing
    assert [_short(e) for e in (0.0, 2e-4, 0.0996, 0.00951, 1.0)] == ["0", ".02", "10", "1.0", "100"]
    assert [heat_step(e) for e in (0.0, *STEPS, 1.0)] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_an_inspection_shows_the_same_map_without_errors() -> None:
    page = Page(inspection_page(inspection()))
    assert "minilm.onnx" in page.text
    assert "folder" not in page.text
    assert "1.0 % of parameters" in page.text
    assert "Add node_add_25" in page.text
    assert "Error" not in page.text
    assert "25 % of the parameters in these blocks removed" in page.text


def test_accuracy_is_shown_where_it_is_known() -> None:
    held = held_out()
    assert "Top-1" not in Page(report_page(encoder(verification=encoder()["verification"] | {"held_out": held}))).text
    scores = {"judged": 64, "top1": 0.984375, "top1_reference": 1.0, "perplexity": None, "perplexity_reference": None}
    outputs = [{**held["outputs"][0], **scores}]
    checks = encoder()["verification"] | {"held_out": held | {"outputs": outputs}, "outputs": outputs}
    page = Page(report_page(encoder(verification=checks))).text
    assert "98.44" in page
    assert "Top-1, original" in page
    assert "Perplexity" not in page


def test_the_gate_on_the_page_is_that_of_the_held_out_samples() -> None:
    recipe = encoder()["recipe"] | {"min_cosine": 0.93}
    held = encoder(recipe=recipe, verification=encoder()["verification"] | {"held_out": held_out()})
    assert "cosine at least 0.93: passed" in Page(report_page(encoder(recipe=recipe))).text
    assert "cosine at least 0.93: failed" in Page(report_page(held)).text


def test_what_followed_the_narrowing_is_told() -> None:
    finding = {"level": "advice", "op": "", "node": "", "reason": "open sizes"}
    quantised = {"kind": "int8", "bytes_before": 400, "bytes_after": 100, "kept_float": ["a", "b"], "notes": []}
    quantised |= checked(output("y", verdict(value=0.5)), on="calibration", samples=64)
    matrices = [{"params_before": 100, "params_after": 10}] * 2
    grasp = {"layers": [{"name": "layer.7", "redundancy": 0.99, "replaced": True}], "matrices": matrices}
    data = encoder(
        quantization=quantised,
        simplify={"nodes_before": 100, "nodes_after": 80},
        target={"table": "TensorRT 10", "date": "2024-06-17", "passed": True, "findings": [finding], "strict": False},
        methods={"grasp": grasp},
    )
    page = Page(report_page(data)).text
    for words in (
        "Kept in float: 2 nodes (outliers in their inputs)",
        "TensorRT 10, table of 2024-06-17: no problem found",
        "advice: open sizes",
        "2 matrices of these layers keep 10.0 % of their parameters",
        "quantized, 64 calibration samples",
    ):
        assert words in page.replace("\u00a0", " ")
    assert "0.5000" in page[: page.index("Before and after")]  # the head judges the file that is written


def test_a_failed_gate_is_said_in_words() -> None:
    recipe = encoder()["recipe"] | {"min_cosine": 0.99}
    assert "cosine at least 0.99: failed" in Page(report_page(encoder(recipe=recipe))).text
    assert "cosine at least 0.9: passed" in Page(report_page(encoder(recipe=recipe | {"min_cosine": 0.9}))).text


def test_a_result_that_is_far_off_is_noted_with_what_helps() -> None:
    far = encoder() | {"verification": checked(output("boxes", verdict("scores", 0.6)))}
    page = report_page(far)
    assert "output boxes is far from the original (F1 of scores above 0.5 60.0\N{NO-BREAK SPACE}%)" in page
    assert '<span class="option">--selector</span> obs bring it closer' in page
    assert "is far from" not in report_page(
        encoder() | {"verification": checked(output("boxes", verdict("scores", 0.98)))}
    )


def test_every_kind_has_a_color_in_light_and_in_dark() -> None:
    style = report_page(encoder()).partition("<style>")[2].partition("</style>")[0]
    for kind in (*KINDS, "other"):
        assert f"svg .is.k-{kind} {{ fill: var(--{kind}); }}" in style
        assert f".kind.k-{kind} {{ color: var(--{kind}); }}" in style
        assert len(set(re.findall(rf"--{kind}: (#\w+);", style))) == 2


def test_figures() -> None:
    s, minus = figures.SPACE, figures.MINUS
    assert [figures.count(v) for v in (None, 1234, 21_300_000, -5)] == ["–", "1,234", f"21.30{s}M", f"{minus}5"]
    assert [figures.size(v) for v in (812, 3_400_000)] == [f"812{s}B", f"3.40{s}MB"]
    assert [figures.change(100, v) for v in (70, 100, 99.99, 130)] == [
        *(f"{minus}30.0{s}%", f"0.0{s}%", f"0.0{s}%", f"+30.0{s}%"),
    ]
    assert figures.change(0, 1) == figures.change(None, 1) == "–"
    assert [figures.error(v) for v in (0.253, 0.0042, 0.00048, 4.8e-5, 0.0, 1e-7)] == [
        *(f"25.3{s}%", f"0.42{s}%", f"0.048{s}%", f"0.0048{s}%", f"0{s}%", f"1.0e{minus}07"),
    ]
    assert [figures.seconds(v) for v in (0.012, 24.41, 120)] == [f"12{s}ms", f"24.4{s}s", f"2.0{s}min"]


def test_shell_quoting_of_the_command() -> None:
    data = encoder(model=encoder()["model"] | {"input": "my models/a'b.onnx"})
    code = re.search(r'<code id="command">(.*?)</code>', report_page(data), re.DOTALL)
    assert code
    words = shlex.split(code[1].replace("&#x27;", "'").replace("&quot;", '"').replace("\\\n", " "))
    assert words[:3] == ["onnxgrail", "compress", "my models/a'b.onnx"]
