"""A short form of the report: plain text for a terminal, a table for a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrail.report.page.html import figures
from onnxgrail.report.page.html.markup import Markup, el, name
from onnxgrail.report.summary import SHARES, search_text, summary_rows

COLUMNS = ("", "before", "after", "change")
BUDGETS = {"size": figures.size, "latency": figures.milliseconds}


def text(data: Mapping[str, Any], headline: object, speed: object) -> str:
    """Return the before/after table of a report as text, with fidelity, speed, and requested and achieved ratio.

    Args:
        data: of the report.
        headline: the verdict on the worst output, None if nothing was compared.
        speed: the verdict on the latency, None if it was not measured.
    """
    rows = [COLUMNS, *(tuple(map(plain, row)) for row in summary(data))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = []
    for first, *numbers in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        table.append("  ".join([first.ljust(widths[0]), *cells]))
    table.insert(1, "─" * len(table[0]))
    return "\n".join([str(data["model"]["input"]), *table, *_lines(data, headline, speed)])


def html(data: Mapping[str, Any], headline: object, speed: object) -> Markup:
    """Return the same as a fragment of HTML."""
    head = el("tr", *(el("th", column) for column in COLUMNS))
    left = "text-align:left"
    body = [
        el("tr", el("th", first, style=left), *(el("td", cell) for cell in cells)) for first, *cells in summary(data)
    ]
    caption = el("caption", name(str(data["model"]["input"])), style=left)
    table = el("table", caption, el("thead", head), el("tbody", *body))
    return el("div", table, *(el("p", line) for line in _lines(data, headline, speed)))


def asked(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the requested and the achieved size or loss, then the removed share of the whole model."""
    model = data["model"]
    budget, lines = model.get("budget"), []
    if budget is not None:
        show = BUDGETS.get(budget["metric"], figures.count)
        achieved = f"{show(budget['achieved'])} ({figures.share(budget['achieved'] / budget['before'])})"
        once = ", measured once" if budget["metric"] == "latency" else ""
        limit = f"asked {budget['asked']} = {show(budget['limit'])}, achieved {achieved}{once}"
        lines.append(f"Target {budget['metric']}: {limit}")
    elif model["asked_ratio"] is not None:
        option = "Unit ratio" if model["ratio_of"] == "units" else "Ratio"
        whole = f"{figures.count(model['ratio_total'])} {SHARES.get(model['ratio_of'], 'parameters')}"
        shares = f"asked {figures.share(model['asked_ratio'])}, achieved {figures.share(model['achieved_ratio'])}"
        lines.append(f"{option}: {shares} of the {whole}")
    elif loss := search_text(data):
        lines.append(f"Loss: {loss}")
        search = data["allocation"]["search"]
        if search["minimize"] == "latency" and not data["latency"]:
            before, after = search["before"], search["cost"]
            times = f"{figures.milliseconds(before)} -> {figures.milliseconds(after)} ({figures.change(before, after)})"
            lines.append(f"Modeled latency: {times}; `onnxgrail bench` measures it")
    removed = f"{figures.share(model['model_ratio'])} of the {figures.count(model['params_before'])} parameters removed"
    return tuple(map(plain, [*lines, f"Whole model: {removed}"]))


def plain(words: str) -> str:
    """Return text without the typography of the page."""
    return words.replace(figures.SPACE, " ").replace(figures.MINUS, "-").replace(figures.NONE, "-")


def _lines(data: Mapping[str, Any], headline: object, speed: object) -> tuple[str, ...]:
    verdicts = (("Fidelity", headline), ("Latency of one run", speed))
    return (*(f"{label}: {verdict}" for label, verdict in verdicts if verdict is not None), *asked(data))


def summary(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the before/after table: label, before, after, change."""
    return [
        (row.label, *map(figures.SHOW[row.unit], (row.before, row.after)), figures.change(row.before, row.after))
        for row in summary_rows(data)
    ]
