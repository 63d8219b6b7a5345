"""The section on sensitivity: error curves and a heat table if they were measured, else a strip of errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrail.report.page.hero import swatch
from onnxgrail.report.page.html import drawing, figures
from onnxgrail.report.page.html.markup import Child, Markup, el, name
from onnxgrail.report.page.html.table import section
from onnxgrail.report.page.network import BlockRow, blocks_of, rows_of

REMOVED = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # errors at which the heat table changes its color
DRAWN = 48  # maximum number of curves; the heat table has all
Curve = Mapping[str, Any]


def sensitivity(data: Mapping[str, Any]) -> Markup | None:
    """Return the section; None if nothing was measured."""
    blocks = blocks_of(rows_of(data))
    place = {block.name: number for number, block in enumerate(blocks)}
    curves = [curve for curve in (data.get("allocation") or {}).get("curves") or () if len(curve["points"]) > 1]
    curves.sort(key=lambda curve: place.get(str(curve["block"]), len(place)))
    if curves:
        kept = {block.name: block.share for block in blocks}
        text = (
            "Measured on the original model: the error of each block alone, after compensation, at several widths. "
            "In the last column, what removing half of it does to the model's outputs."
        )
        shown = _most_felt(curves)
        title = "Error over width" + (f", the {len(shown)} blocks felt most" if len(shown) < len(curves) else "")
        return section(
            "sensitivity",
            "Sensitivity",
            el("p", text),
            _heat(curves),
            el("h3", title),
            el(
                "p",
                "From nothing kept (left) to everything (right), and a dot at the width that was taken.",
                class_="sub",
            ),
            el("ul", *(_small(curve, kept.get(str(curve["block"]))) for curve in shown), class_="multiples"),
            long=True,
        )
    if any(block.plain is not None or block.compensated is not None for block in blocks):
        hint = el("p", "The error of each block alone at other widths is measured with --curves.", class_="sub")
        return section("sensitivity", "Sensitivity", _strip(blocks), hint, long=True)
    return None


def _most_felt(curves: Sequence[Curve]) -> list[Curve]:
    """Return at most `DRAWN` curves: those of the blocks with the largest effect on the outputs, in order."""
    ranked = sorted(curves, key=lambda curve: curve.get("effect") or 0.0, reverse=True)
    chosen = {str(curve["block"]) for curve in ranked[:DRAWN]}
    return [curve for curve in curves if str(curve["block"]) in chosen]


def _points(curve: Curve) -> list[tuple[float, float]]:
    units = max(int(curve["units"]), 1)
    return [(kept / units, float(error)) for kept, error in curve["points"]]


def _small(curve: Curve, taken: float | None) -> Markup:
    points = _points(curve)
    said = [f"{figures.share(x, 0)} kept: {figures.error(y)}" for x, y in points[1:-1]]
    chosen = "" if taken is None else f"; taken: {figures.share(taken, 0)}"
    label = f"Error of {curve['block']}: {', '.join(said)}{chosen}"
    where = None if taken is None else el("span", f"{figures.share(taken, 0)} kept", class_="sub")
    return el("li", drawing.curve(points, taken, label), el("span", name(str(curve["block"])), class_="name"), where)


def heat_step(error: float) -> int:
    """Return the number of the color of an error."""
    return sum(error >= step for step in STEPS)


def _heat(curves: Sequence[Curve]) -> Markup:
    """Return a table of errors with numbers on colors, so that it is readable without colors."""
    head = [el("th", c, scope="col") for c in ("Block", *(f"{100 * r:g}" for r in REMOVED), "Outputs")]
    body = []
    for curve in curves:
        cells = []
        for removed in REMOVED:
            error = drawing.at(_points(curve), 1 - removed)
            cells.append(el("td", _short(error), class_=f"h{heat_step(error)}"))
        effect = curve.get("effect")
        cells.append(el("td", figures.error(effect), class_="effect"))
        body.append(el("tr", el("th", name(str(curve["block"])), scope="row"), *cells))
    caption = el("span", "Error in percent of the block's output, by the percentage of its units that is removed")
    grid = el("table", el("caption", caption), el("thead", el("tr", *head)), el("tbody", *body), class_="heat")
    return el("div", grid, class_="scroll", role="region", tabindex=0, aria_label="Heat table of errors")


def _short(error: float) -> str:
    """Format an error in percent with at most three characters."""
    value = 100 * error
    if value < 0.005:
        return "0"
    if value < 0.095:
        return f"{value:.2f}"[1:]
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _strip(blocks: Sequence[BlockRow]) -> Markup:
    """Return strips with a column per block: before compensation, after it, and on held-out samples."""
    lines: list[tuple[str, list[float | None]]] = [
        ("before compensation", [block.plain for block in blocks]),
        ("after compensation", [block.compensated for block in blocks]),
        ("validation, against the original network", [block.validation for block in blocks]),
    ]
    items: list[Child] = []
    for title, errors in lines:
        known = [(e, block.name) for e, block in zip(errors, blocks, strict=True) if e is not None]
        if not known:
            continue
        worst, where = max(known, key=lambda item: item[0])
        mean = math.fsum(error for error, _ in known) / len(known)
        label = f"{title}: largest {figures.error(worst)} in {where}, mean {figures.error(mean)}"
        items.append(el("h3", title.capitalize(), class_="small"))
        items.append(_cells(errors, blocks, label))
        items.append(el("p", "largest ", el("b", figures.error(worst)), " in ", name(where), class_="sub"))
    keys = [el("li", swatch(f"h{step}", 14), text) for step, text in enumerate(_ranges())]
    text = "Error of each block, squared, as a share of its output; from input (left) to output (right)."
    return el("div", el("p", text), *items, el("ul", *keys, class_="keys"), class_="strip")


def _cells(errors: Sequence[float | None], blocks: Sequence[BlockRow], label: str) -> Markup:
    slot = 100 / len(blocks)
    shapes = []
    for number, (error, block) in enumerate(zip(errors, blocks, strict=True)):
        style = "none" if error is None else f"h{heat_step(error)}"
        size = 4.0 if error is None else 6 + 34 * drawing.on_scale(error) / 100
        shapes.append(
            el(
                "rect",
                el("title", f"{block.name}: {figures.error(error)}"),
                x=drawing.percent((number + 0.06) * slot),
                width=drawing.percent(0.88 * slot),
                y=44 - size,
                height=size,
                class_=style,
            )
        )
    return drawing.svg(*shapes, height=44, label=label)


def _ranges() -> list[str]:
    ends = [figures.share(s, 1 if s < 0.01 else 0) for s in STEPS]
    return [f"below {ends[0]}", *(f"{a} to {b}" for a, b in itertools.pairwise(ends)), f"{ends[-1]} and more"]
