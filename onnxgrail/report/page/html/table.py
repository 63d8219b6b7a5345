"""Tables with a caption, column headers and row headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxgrail.report.page.html.markup import Child, Markup, el


def table(caption: Child, columns: Sequence[Child], rows: Iterable[Sequence[Child]], *, class_: str = "") -> Markup:
    """Return a table whose first column names the row; the others hold numbers."""
    body = []
    for first, *rest in rows:
        cells = (el("td", cell, data_label=label, role="cell") for label, cell in zip(columns[1:], rest, strict=True))
        body.append(el("tr", el("th", first, scope="row", role="rowheader"), *cells, role="row"))
    return framed(caption, columns, body, class_=f"plain {class_}".strip())


def framed(
    caption: Child, columns: Iterable[Child], rows: Iterable[Markup], *, class_: str, identity: str | None = None
) -> Markup:
    """Return a table of rows that are markup already; `identity` is that of its body."""
    head = el("tr", *(el("th", column, scope="col", role="columnheader") for column in columns), role="row")
    body = el("tbody", *rows, role="rowgroup", id=identity)
    return el("table", el("caption", caption), el("thead", head, role="rowgroup"), body, class_=class_, role="table")


def section(identity: str, title: str, *children: Child, long: bool = False) -> Markup:
    """Return a section of the page with its heading; a long one can be folded, and is on a phone."""
    heading = el("h2", title, id=f"{identity}-title")
    parts: tuple[Child, ...] = (heading, *children)
    if long:
        parts = (el("details", el("summary", heading), *children, class_="fold", open=True),)
    return el("section", *parts, id=identity, aria_labelledby=f"{identity}-title")
