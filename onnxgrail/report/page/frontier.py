"""The page of a frontier: loss against each cost, a table of the points, and their commands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnxgrail.report.frontier import measured, named
from onnxgrail.report.page.command import copied
from onnxgrail.report.page.hero import brand, title_of
from onnxgrail.report.page.html import drawing, figures
from onnxgrail.report.page.html.markup import Markup, el, name
from onnxgrail.report.page.html.table import section, table

COSTS = {
    "bytes": ("File size", figures.size),
    "macs": ("MACs per sample", figures.count),
    "latency_ms": ("Modeled latency", figures.milliseconds),
}
"""The costs that are plotted, with their titles and formats."""
LOSSES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # at which a plot may have grid lines
LEFT, WIDE = 12.0, 84.0  # percent: the place of cost 0, and the width from there to the cost of the original
TOP, HEIGHT = 12, 190  # pixels
Point = Mapping[str, Any]


def header(data: Mapping[str, Any]) -> Markup:
    """Return the top of the page."""
    points, model = data["points"], data["model"]
    last = points[-1]
    lead = (
        f"{figures.plural(len(points), 'point')}, from the original with {figures.count(model['params'])} parameters "
        f"to {figures.count(last['params'])} at a loss of {figures.error(last['loss']['mean'])}. "
        "Every point can be written as a file."
    )
    return el("header", brand("frontier"), el("h1", name(title_of(model["input"]))), el("p", lead, class_="lead"))


def sections(data: Mapping[str, Any]) -> list[Markup | None]:
    """Return the sections of the page."""
    notes = [el("li", figures.words(note)) for note in data["notes"]]
    told = {point["number"]: point["command"] for point in data["points"]}
    commands = [el("div", el("h3", f"Point {n}"), copied(f"command-{n}", command)) for n, command in told.items()]
    return [
        section("notes", "Notes", el("ul", *notes)) if notes else None,
        _plots(data),
        section("points", "Points", _table(data)),
        section("commands", "Commands", *commands),
    ]


def _plots(data: Mapping[str, Any]) -> Markup:
    known = {key: title for key, (title, _) in COSTS.items() if data["model"][key]}
    text = (
        "From top to bottom the loss falls, from left to right the cost grows up to that of the original. A dot is the "
        "mean loss of a point, the line above it ends at its upper bound. The command of a point appears below the "
        "plots when its dot is pointed at or focused."
    )
    plots = [
        el("li", el("h3", title), _plot(data["points"], float(data["model"][key]), key)) for key, title in known.items()
    ]
    shown = el("p", "Point at a dot, or follow it to its row.", id="shown", class_="note", aria_live="polite")
    return section("plots", "Loss against cost", el("p", text), el("ul", *plots, class_="plots"), shown)


def _plot(points: Sequence[Point], before: float, key: str) -> Markup:
    """Draw the loss of the points over one cost; the axis of the loss is its root, to tell small losses apart."""
    most = max(max(point["loss"]["bound"], point["loss"]["mean"]) for point in points) or 1.0
    title, show = COSTS[key]
    path = [(1.0, 0.0), *((point[key] / before, point["loss"]["mean"] / most) for point in points)]
    curve, left, width = (
        el("polyline", points=drawing.rooted(path), class_="curve"),
        drawing.percent(LEFT),
        drawing.percent(WIDE),
    )
    line = el("svg", curve, x=left, y=TOP, width=width, height=HEIGHT, **drawing.STRETCHED, overflow="visible")
    dots = [_dot(point, before, most, key) for point in points]
    return el(
        "svg",
        *_grid(most, show(before)),
        line,
        *dots,
        width="100%",
        height=HEIGHT + TOP + 24,
        role="group",
        aria_label=f"Loss against {title.lower()}, {figures.plural(len(points), 'point')}",
    )


def _grid(most: float, before: str) -> Iterator[Markup]:
    """Yield lines at a few losses, and the ends of the axis of the cost."""
    for loss in [0.0, *(loss for loss in LOSSES if 0.05 * most <= loss <= most)]:
        y = _height(loss, most)
        yield el("line", x1=drawing.percent(LEFT), x2=drawing.percent(LEFT + WIDE), y1=y, y2=y, class_="axis")
        yield el("text", f"{100 * loss:g} %", x=drawing.percent(LEFT - 1), y=y + 4, text_anchor="end", class_="tick")
    low = TOP + HEIGHT + 18
    yield el("text", "0", x=drawing.percent(LEFT), y=low, text_anchor="middle", class_="tick")
    yield el("text", before, x=drawing.percent(LEFT + WIDE), y=low, text_anchor="end", class_="tick")


def _dot(point: Point, before: float, most: float, key: str) -> Markup:
    """Draw a point as a link to its row, with its numbers and its command as accessible name and hint."""
    x, loss = drawing.percent(LEFT + WIDE * point[key] / before), point["loss"]
    said = f"Point {point['number']}: loss {figures.error(loss['mean'])}, {COSTS[key][1](point[key])}"
    y, high = (_height(value, most) for value in (loss["mean"], loss["bound"]))
    return el(
        "a",
        el("title", f"{said}. {point['command']}"),
        el("line", x1=x, x2=x, y1=y, y2=high, class_="gain"),
        el("circle", cx=x, cy=y, r=6, class_="after"),
        href=f"#point-{point['number']}",
        aria_label=said,
        data_shows=f"command-{point['number']}",
    )


def _height(loss: float, most: float) -> float:
    return TOP + HEIGHT * (1 - math.sqrt(min(max(loss / most, 0.0), 1.0)))


def _table(data: Mapping[str, Any]) -> Markup:
    model = data["model"]
    measure, losses = measured(point["loss"] for point in data["points"])
    heading = measure[:1].upper() + measure[1:]
    columns = ["Point", "Loss", "At most", heading, "Parameters", "MACs", "Size", "Latency", "of the original"]
    rows: list[list[Any]] = [["original", *(figures.NONE,) * 3, *_costs(model, model)]]
    for point in data["points"]:
        loss, number = point["loss"], str(point["number"])
        agreement = loss["agreement"]
        counted = figures.share if agreement["counted"] else figures.number
        link = el("a", number, id=f"point-{number}", href=f"#command-{number}", aria_label=f"Command of point {number}")
        agreed = named(agreement, measure) + counted(agreement["value"])
        rows.append([link, figures.error(loss["mean"]), figures.error(loss["bound"]), agreed, *_costs(point, model)])
    for row in (columns, *rows) if not measure else ():  # a loss of the user's own tells no agreement
        del row[3]
    caption = f"Loss: {losses}; at most: its one-sided 95 % upper bound"
    return el("div", table(caption, columns, rows), class_="scroll", role="region", tabindex=0, aria_label="Points")


def _costs(point: Point, model: Point) -> tuple[str, ...]:
    known = point["latency_ms"] is not None and model["latency_ms"]
    share = figures.share(point["latency_ms"] / model["latency_ms"]) if known else figures.NONE
    latency = figures.milliseconds(point["latency_ms"]) if known else figures.NONE
    return figures.count(point["params"]), figures.count(point["macs"]), figures.size(point["bytes"]), latency, share
