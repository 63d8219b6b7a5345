"""Write `docs/narrowing.html` and `docs/img/narrowing.svg` from `bench/results/narrowing.json`.

    python -m bench.narrowing > bench/results/narrowing.json
    python docs/narrowing_page.py

The page is one file: one block of the embedded digits model, narrowed as far as a slider says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxgrail.report.page.html.drawing import percent, svg
from onnxgrail.report.page.html.markup import Markup, el, join
from onnxgrail.report.page.html.shell import document
from onnxgrail.report.page.html.table import section, table

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "narrowing.html", DOCS / "img" / "narrowing.svg"
RESULTS = DOCS.parent / "bench" / "results" / "narrowing.json"
LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz+-"
MOST = 1.25  # error at the top of the chart
START = 16  # channels removed when the page opens, and in the picture
TICKS = {"error": ((0.0, "0"), (0.5, "50 %"), (1.0, "100 %")), "accuracy": ((0.0, "0"), (0.5, "50 %"), (1.0, "100 %"))}
WAYS = {
    "removed": "removed",
    "repaired": "removed, repaired",
    "merged": "merged, repaired",
    "default": "the default",
}
LEAD = (
    "One block of a small network for handwritten digits loses channels. Move the slider to see which channels go, "
    "what that does to their consumer, the layer that reads them, and how much of it a closed-form repair brings back."
)
EXPLAINED = {
    "Removed:": "the channels with the lowest scores go (`--selector wanda`: size of a channel times the consumer "
    "weights). The consumer has lost a part of its sum, so its output is wrong.",
    "Removed, repaired:": "channels are not independent. Ridge regression predicts the missing ones from those that "
    "remain, on {calibration} calibration images without labels, and the prediction is multiplied into the weights "
    "of the consumer (`--compensate grail`). The file stays as small as without repair.",
    "Merged, repaired:": "similar channels are averaged instead (`--reducer fold`). In this block, that mostly keeps "
    "less than removing.",
    "The default": "(`--compensate best`): every tap of the consumer's window gets its own fit, and the layers "
    "downstream are fitted, too. Their answers recover even where the block itself has lost much.",
}
MEASURED = (
    "Model {model}, block {block} ({width} channels), each width on its own; all other blocks stay whole. Fitted to "
    "{calibration} calibration images. **Error** is the squared error of the consumer's output as a share of its "
    "squared output; error and accuracy are measured on {held_out} held-out images, accuracy with its 95 % interval "
    "(Wilson). Differences within the intervals say nothing. One model and one block: other blocks react more or less. "
    "Measured on {date} by `python -m bench.narrowing`; this page is written by `docs/narrowing_page.py`."
)


def page(data: Mapping[str, Any]) -> str:
    """Return the page as one HTML file."""
    words = {**data, **data["samples"]}
    told = [el("p", rich(f"**{name}** {text.format(**words)}")) for name, text in EXPLAINED.items()]
    header = join([el("h1", "Narrowing and repair"), el("p", LEAD, class_="lead")])
    sections = [
        section("try", "Try it", *tried(data)),
        section("why", "What happens", *told),
        section("all", "All widths", every(data), long=True),
        section("measured", "How it was measured", el("p", rich(MEASURED.format(**words)))),
    ]
    figures = json.dumps({**data, "levels": LEVELS, "most": MOST}, separators=(",", ":"))
    sections.append(el("script", Markup(figures), type="application/json", id="figures"))
    return document(
        "Narrowing and repair: onnxgrail",
        header,
        sections,
        "Part of the documentation of onnxgrail; this file fetches nothing and sends nothing.",
        style=template("narrowing.css"),
        script=template("narrowing.js"),
    )


def template(name: str) -> str:
    """Return a file of the templates."""
    return (DOCS / "templates" / name).read_text(encoding="utf-8")


def rich(text: str) -> Markup:
    """Return text with **bold** and `code` as markup."""
    parts = [el("b", part) if n % 2 else _code(part) for n, part in enumerate(text.split("**"))]
    return join(parts)


def _code(text: str) -> Markup:
    return join([el("code", part) if n % 2 else part for n, part in enumerate(text.split("`"))])


def tried(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield the slider, the channels, the figures at its place, the charts and the images."""
    step, last = data["steps"][START - 1], data["width"] - 1
    slider = el("input", type="range", id="gone", min=0, max=last, value=START, aria_describedby="told")
    told = el("output", f"{START} of {data['width']} ({START / data['width']:.0%})", id="told", for_="gone")
    yield el("div", el("label", "Channels to remove", for_="gone"), slider, told, class_="slide")
    choices = [
        el("label", el("input", type="radio", name="how", value=value, checked=value == "removed"), words)
        for value, words in (("removed", "removed"), ("merged", "merged"))
    ]
    legend = el("legend", "The picture shows channels that are")
    yield el("fieldset", legend, *choices, class_="how needs-script", hidden=True)
    channels = [
        el("li", str(n), class_=None if n in step["kept"] else "gone", aria_label=f"channel {n}")
        for n in range(data["width"])
    ]
    yield el("ul", *channels, class_="channels", aria_label="Channels of the block")
    yield el("div", now(step), id="now")
    yield el("p", id="live", class_="sub", role="status")
    yield el("div", *(chart(data, key) for key in ("error", "accuracy")), class_="charts")
    yield el("ul", *(key(n, words) for n, words in enumerate(WAYS.values())), class_="keys")
    names = {
        "input": "a held-out digit",
        "dense": "one channel of the consumer's output",
        "removed": "the same, channels removed",
        "repaired": "the same, repaired",
    }
    maps = [image(data, name, words) for name, words in names.items()]
    yield el("div", *maps, class_="maps needs-script", hidden=True)


def now(step: Mapping[str, Any]) -> Markup:
    """Return the table of the figures at one width."""
    lines = [(words, *cells(step[way])) for way, words in WAYS.items()]
    return table("On held-out images", ["channels", "error of the consumer", "accuracy of the model (95 %)"], lines)


def cells(one: Mapping[str, Any]) -> tuple[str, str]:
    """Format error and accuracy."""
    low, high = one["interval"]
    return f"{100 * one['error']:.1f} %", f"{100 * one['accuracy']:.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def every(data: Mapping[str, Any]) -> Markup:
    """Return the table of all widths."""
    columns = ["removed", *(f"{words}: {what}" for words in WAYS.values() for what in ("error", "accuracy"))]
    lines = []
    for step in data["steps"]:
        found = [f"{100 * step[way][key]:.1f}" for way in WAYS for key in ("error", "accuracy")]
        lines.append((str(data["width"] - step["width"]), *found))
    caption = f"Percent, on held-out images; the whole model has {100 * data['dense']['accuracy']:.1f} % accuracy"
    return el("div", table(caption, columns, lines, class_="small"), class_="scroll", tabindex=0)


def chart(data: Mapping[str, Any], key: str) -> Markup:
    """Return the chart of a figure over the number of removed channels."""
    last, most = data["width"] - 1, MOST if key == "error" else 1.0
    words = {"error": "Error of the consumer", "accuracy": "Accuracy of the model"}[key]
    grid = []
    for value, text in TICKS[key]:
        y = percent(100 * (1 - value / most))
        grid += [el("line", x1="0", x2="100%", y1=y, y2=y, class_="axis")]
        grid += [el("text", text, x=0, y=y, dy=-3, class_="tick")]
    lines, dots = [], []
    for n, way in enumerate(WAYS):
        points = [(0.0, 0.0 if key == "error" else data["dense"]["accuracy"])]
        points += [(data["width"] - step["width"], step[way][key]) for step in data["steps"]]
        path = " ".join(f"{100 * x / last:.2f},{100 * (1 - min(y, most) / most):.2f}" for x, y in points)
        lines.append(el("polyline", points=path, class_=f"line c{n}"))
        x, y = points[START]
        dots.append(
            el(
                "circle",
                cx=percent(100 * x / last),
                cy=percent(100 * (1 - y / most)),
                r=4,
                class_=f"c{n}",
                id=f"{key}-{way}",
            )
        )
    inner = el(
        "svg",
        *lines,
        width="100%",
        height="100%",
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        overflow="visible",
    )
    x = percent(100 * START / last)
    label = f"{words} over the number of removed channels, 0 to {last}; the table of all widths has the figures"
    drawn = svg(*grid, el("line", x1=x, x2=x, y1="0", y2="100%", class_="at"), inner, *dots, height=190, label=label)
    caption = el("figcaption", f"0 to {last} channels removed")
    return el("figure", el("h3", words), drawn, caption)


def key(number: int, words: str) -> Markup:
    """Return a line of the legend."""
    line = el("line", x1=0, x2=34, y1=6, y2=6, class_=f"c{number}")
    return el("li", el("svg", line, width=34, height=12, aria_hidden="true"), words)


def image(data: Mapping[str, Any], name: str, words: str) -> Markup:
    """Return the place of an image, which the script draws."""
    side = data["dense"]["side"]
    place = el("svg", id=f"map-{name}", viewBox=f"0 0 {side} {side}", role="img", aria_label=words)
    return el("figure", place, el("figcaption", words))


HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 330" role="img" aria-labelledby="title">
<title id="title">{title}</title>
<style>
.card{{fill:#fff;stroke:#c9d1d9}}.keep{{fill:#2a9d8f}}.gone{{fill:none;stroke:#9aa5b1;stroke-dasharray:3 2}}
.fit{{fill:#d9822b}}.track{{fill:#e7ebee}}.bad{{fill:#b4532a}}
text{{font-family:system-ui,sans-serif;font-size:13px;fill:#24292f}}.b{{font-size:15px;font-weight:600}}.s{{fill:#57606a}}
@media (prefers-color-scheme:dark){{.card{{fill:#161b22;stroke:#3d444d}}.keep{{fill:#2fb5a5}}.gone{{stroke:#6e7781}}
.fit{{fill:#e3964a}}.track{{fill:#2b323a}}.bad{{fill:#e07b4f}}text{{fill:#e6edf3}}.s{{fill:#adb7c1}}}}
@media (prefers-reduced-motion:no-preference){{
.p1{{animation:in .6s 1s both}}.p2{{animation:in .6s 2.8s both}}@keyframes in{{from{{opacity:0}}}}
.grow{{transform-box:fill-box;transform-origin:left;animation:grow .8s 1.6s both}}
@keyframes grow{{from{{transform:scaleX(0)}}}}
.shrink{{transform-box:fill-box;transform-origin:left;animation:shrink .8s 3.4s both}}
@keyframes shrink{{from{{transform:scaleX({more})}}}}}}
</style>
<rect x="0.5" y="0.5" width="959" height="329" rx="10" class="card"/>
"""
BAR = 240  # pixels of an error of 50 %


def picture(data: Mapping[str, Any]) -> str:
    """Return the picture: one block whole, narrowed, and repaired; it moves once, if the reader wants motion."""
    step, dense = data["steps"][START - 1], data["dense"]
    plain, fitted = step["removed"], step["repaired"]
    title = (
        f"{START} of {data['width']} channels of a block go: the error of their consumer is "
        f"{plain['error']:.0%}, and {fitted['error']:.0%} after repair"
    )
    whole = {"error": 0.0, **dense}
    parts = [
        *panel(24, "1 The block", whole, (range(data["width"]), "keep", "")),
        "<g class='p1'>",
        *panel(336, "2 Narrowed", plain, (step["kept"], "keep", "grow")),
        "</g><g class='p2'>",
        *panel(648, "3 Repaired", fitted, (step["kept"], "fit", "shrink")),
        "</g>",
    ]
    words = (
        f"{data['model']}, {data['block']}; {data['samples']['held_out']} held-out images, accuracy with 95 % "
        "intervals. Orange: weights refitted by ridge regression."
    )
    parts.append(_text(24, 310, words, "s"))
    more = f"{plain['error'] / fitted['error']:.2f}"
    return HEAD.format(title=title, more=more) + "\n".join(parts) + "\n</svg>\n"


def panel(left: int, title: str, one: Mapping[str, Any], shown: tuple[Any, str, str]) -> Iterator[str]:
    """Draw producer channels, the weights that read them, and the figures of one state."""
    kept, reader, motion = shown
    yield _text(left, 36, title, "b")
    for row, (words, kind) in enumerate((("channels", "keep"), ("weights of the consumer", reader))):
        top = 52 + 74 * row
        yield _text(left, top + 12, words, "s")
        for n in range(32):
            x, y = left + 18 * (n % 16), top + 20 + 20 * (n // 16)
            style = kind if n in kept else "gone"
            yield f'<rect x="{x}" y="{y}" width="15" height="16" rx="2" class="{style}"/>'
    yield _text(left, 218, f"error of the consumer: {one['error']:.1%}".replace("%", " %"))
    yield f'<rect x="{left}" y="228" width="{BAR}" height="14" rx="2" class="track"/>'
    width = round(BAR * one["error"] / 0.5, 1)
    if width:
        yield f'<rect x="{left}" y="228" width="{width:g}" height="14" rx="2" class="bad {motion}"/>'
    low, high = (f"{100 * end:.1f}" for end in one["interval"])
    yield _text(left, 270, f"accuracy: {100 * one['accuracy']:.1f} % ({low}–{high})", "b" if motion else "")


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


if __name__ == "__main__":
    known = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(known), encoding="utf-8")
    PICTURE.write_text(picture(known), encoding="utf-8")
