"""Write `docs/img/before-after.svg` from the result of the demo: `python docs/before_after.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PICTURE = DOCS / "img" / "before-after.svg"
RESULT = DOCS.parent / "bench" / "results" / "demo.json"
RATIO, COMPENSATE = 0.5, "best"
LAYERS = (70, 130, 130, 180, 180, 60)  # a sketch of a network; its input and its output keep their widths
MODELS = ("digits_resnet", "digits_vit", "char_llama")
BAR = 180  # pixels of a measure of the original model

Row = Mapping[str, Any]

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 300" role="img" aria-labelledby="title">
<title id="title">{title}</title>
<style>
.card{{fill:#fff;stroke:#c9d1d9}}.old{{fill:none;stroke:#9aa5b1;stroke-dasharray:3 2}}.new{{fill:#2a9d8f}}
.io{{fill:#9aa5b1}}
text{{font-family:system-ui,sans-serif;font-size:13px;fill:#24292f}}.b{{font-weight:600}}.s{{fill:#57606a}}
@media (prefers-color-scheme:dark){{.card{{fill:#161b22;stroke:#3d444d}}.old{{stroke:#6e7781}}.new{{fill:#2fb5a5}}
text{{fill:#e6edf3}}.s{{fill:#adb7c1}}}}
</style>
<rect x="0.5" y="0.5" width="899" height="299" rx="10" class="card"/>
"""


def picture(data: Mapping[str, Any]) -> str:
    """Return the picture as SVG: a sketch of a network, and what the demo measured, before and after."""
    title = (
        f"Before and after --ratio {RATIO:g} --compensate {COMPENSATE}: narrower layers, fewer parameters, less time"
    )
    rows = {name: (_row(data, name, 0.0, ""), _row(data, name, RATIO, COMPENSATE)) for name in MODELS}
    parts = [*_network(30, "before", 1.0), *_network(240, "after", (1 - RATIO) ** 0.5)]
    parts.append(_text(470, 32, f"three models, --ratio {RATIO:g} --compensate {COMPENSATE}", "b"))
    for place, (dense, small) in enumerate(rows.values()):
        parts += _measures(56 + 82 * place, dense, small)
    return HEAD.format(title=title) + "\n".join(parts) + "\n</svg>\n"


def _row(data: Mapping[str, Any], model: str, ratio: float, compensate: str) -> Row:
    wanted = (model, ratio, compensate)
    return next(row for row in data["rows"] if (row["model"], row["ratio"], row["compensate"]) == wanted)


def _network(left: int, title: str, share: float) -> Iterator[str]:
    """Draw one bar per layer, its width for its channels; dashes show the original width."""
    yield _text(left + 90, 32, title, "b", "middle")
    for place, full in enumerate(LAYERS):
        top, ends = 56 + 36 * place, place in {0, len(LAYERS) - 1}
        width = full if ends else round(full * share)
        if width < full:
            yield _bar(left + 90 - full / 2, top, full, "old")
        yield _bar(left + 90 - width / 2, top, width, "io" if ends else "new")
        if ends:
            yield _text(left + 90, top + 15, "output" if place else "input", "", "middle")
    yield _text(left + 90, 286, "same inputs and outputs" if share < 1 else "channels of each layer", "s", "middle")


def _measures(top: int, dense: Row, small: Row) -> Iterator[str]:
    """Draw what one model costs and how good it is."""
    score = "{:.2%}" if dense["metric"] == "accuracy" else "{:.2f}"
    scores = f"{dense['metric']} {score.format(dense['score'])} → {score.format(small['score'])}".replace("%", " %")
    yield _text(470, top + 10, dense["model"], "b")
    yield _text(600, top + 10, scores)
    for place, (name, key, shown) in enumerate(
        (("parameters", "params", "{:,}"), ("latency", "latency_ms", "{:.2f} ms")), start=1
    ):
        y = top - 4 + 24 * place
        yield _text(470, y + 14, name, "s")
        yield _bar(550, y, BAR, "old")
        yield _bar(550, y, round(BAR * small[key] / dense[key]), "new")
        yield _text(550 + BAR + 8, y + 14, f"{shown.format(dense[key])} → {shown.format(small[key])}")


def _bar(x: float, y: int, width: int, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y}" width="{width}" height="20" rx="2" class="{kind}"/>'


def _text(x: int, y: int, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")
