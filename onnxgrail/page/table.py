"""Tables with a caption, column headers and row headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxgrail.page.markup import Child, Markup, el


def table(caption: Child, columns: Sequence[Child], rows: Iterable[Sequence[Child]], *, class_: str = "") -> Markup:
    """A table whose first column names the row; the others hold numbers."""
    head = el("tr", *(el("th", column, scope="col") for column in columns))
    body = [el("tr", el("th", row[0], scope="row"), *(el("td", cell) for cell in row[1:])) for row in rows]
    return el("table", el("caption", caption), el("thead", head), el("tbody", *body), class_=f"plain {class_}".strip())


def section(identity: str, title: str, *children: Child) -> Markup:
    """A part of the page with a heading that names it."""
    heading = el("h2", title, id=f"{identity}-title")
    return el("section", heading, *children, id=identity, aria_labelledby=f"{identity}-title")
