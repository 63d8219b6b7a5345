"""Tables with a caption, column headers and row headers, and controls over their rows: search, kind, order.

The controls show only if scripts run, since these do the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


def controls(rows: str, kinds: Iterable[str], orders: Mapping[str, str]) -> Markup:
    """Return the controls of a table, which read the `data-*` attributes of its rows.

    Args:
        rows: identity of the table's body.
        kinds: values of `data-kind` to choose from.
        orders: title by the attribute to sort by, largest first; `name` is sorted as text, smallest first.
    """
    every_kind = {"": "all", **{one: one for one in kinds}}
    every_order = {"": "network", **orders}
    return el(
        "div",
        el("label", "Search ", el("input", type="search", aria_label="Search", autocomplete="off", spellcheck="false")),
        el("label", "Kind ", _select("Kind", every_kind)),
        el("label", "Sort by ", _select("Sort by", every_order)),
        el("p", role="status"),
        class_="controls",
        role="search",
        aria_label="Rows of the table",
        data_rows=rows,
        hidden=True,
    )


def _select(label: str, options: Mapping[str, str]) -> Markup:
    shown = (el("option", title, value=value) for value, title in options.items())
    return el("select", *shown, aria_label=label)


def sortable(**values: float | None) -> dict[str, str]:
    """Return the attributes of a row to sort by, in full precision; None leaves one out."""
    return {f"data_{key}": repr(float(value)) for key, value in values.items() if value is not None}
