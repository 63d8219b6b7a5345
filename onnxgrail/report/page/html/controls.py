"""Controls over the rows of a table: search, kind, order.  They show only if scripts run, since these do the work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnxgrail.report.page.html.markup import Markup, el


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
