"""The block map: the network from input to output, one row per block, with refusals at their place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrail.report.page.html import drawing, figures
from onnxgrail.report.page.html.markup import Child, Markup, el, join, name
from onnxgrail.report.page.html.table import controls, framed, section, sortable
from onnxgrail.report.page.network import BlockRow, LeftRow, Row, blocks_of, rows_of

VALIDATION = "validation: on data left out of the fit, compared with the original network, earlier narrowing included"
LEFT = "left alone"  # kind of the rows of refusals
LISTED = 30  # nodes, and weights of each role, that a block lists
NAMED = 6  # nodes named in one row; the section on what was left alone names more


def narrowed_map(data: Mapping[str, Any], *, narrowed: bool = True) -> Markup:
    """Return the section with all blocks and refusals of a report; in an inspection, nothing is narrowed."""
    rows = rows_of(data)
    blocks = blocks_of(rows)
    if not rows:
        return section("network", "The network, block by block", el("p", "There is nothing that could be narrowed."))
    measured = any(block.plain is not None or block.compensated is not None for block in blocks)
    widest = max((block.width for block in blocks), default=1)
    last = "Error" if narrowed else "Share of the model"
    columns = ("Block", "Width", "Units", last)
    total = data.get("params"), data.get("macs")
    body = _rows(rows, widest, total, narrowed=narrowed)
    orders = {"name": "name", "width": "width", "share": "share left", "error": "error"}
    if not narrowed:
        orders = {"name": "name", "width": "width", "params": "parameters"}
    left = [LEFT] if any(isinstance(row, LeftRow) for row in rows) else []
    return section(
        "network",
        "The network, block by block",
        controls("network-rows", [*(block.kind_name for block in blocks), *left], orders),
        _legend(blocks, measured=measured) if narrowed else None,
        framed(_caption(rows, narrowed=narrowed), columns, body, class_="map", identity="network-rows"),
        long=True,
    )


dense_map = functools.partial(narrowed_map, narrowed=False)


def _caption(rows: tuple[Row, ...], *, narrowed: bool) -> str:
    left = sum(len(row.nodes) for row in rows if isinstance(row, LeftRow))
    text = "From input to output. The length of a bar follows the square root of the block's width"
    text += "; what is left of it is solid." if narrowed else "."
    return text + (f" Between the blocks: {figures.plural(left, 'place')} left alone, with the reason." if left else "")


def _legend(blocks: list[BlockRow], *, measured: bool) -> Markup | None:
    if not measured:
        return None
    items = [("before compensation", "plain"), ("after", "compensated")]
    if any(block.validation is not None for block in blocks):
        items.append((VALIDATION, "validation"))
    keys = [el("li", _mark(kind), text) for text, kind in items]
    whose = ", on data left out of the fit, earlier narrowing included" if any(b.held_out for b in blocks) else ""
    scale = f"Error: squared, as a share of the block's output{whose}; scale from 0.01 % to 100 %, each tick ten times"
    scale += " the last."
    return el("div", el("p", scale), el("ul", *keys, class_="keys"), class_="legend")


def _mark(kind: str) -> Markup:
    shapes = {
        "plain": el("circle", cx=7, cy=7, r=4, class_="before"),
        "compensated": el("circle", cx=7, cy=7, r=4.5, class_="after"),
        "validation": el("path", d="M7 2 L12 7 L7 12 L2 7 Z", class_="heldout"),
    }
    return el("svg", shapes[kind], width=14, height=14, aria_hidden="true", focusable="false")


def _block(block: BlockRow, widest: int, total: tuple[float | None, float | None], *, narrowed: bool) -> Markup:
    last = _errors(block) if narrowed else _held(block, total)
    return el(
        "tr",
        el("th", titled(block), scope="row", role="rowheader"),
        el("td", drawing.lying(block, widest), class_="drawn", role="cell"),
        el("td", *_units(block), class_="units", role="cell"),
        el("td", last, class_="errors", role="cell"),
        role="row",
        data_kind=block.kind_name,
        data_name=block.name,
        **sortable(width=block.width, share=block.share, error=block.error, params=block.params),
    )


def titled(block: BlockRow) -> Markup:
    """Return kind and name of a block; they open the list of its nodes and weights."""
    kind = el("span", block.kind_name, class_=f"kind k-{block.kind_class}")
    head = join((kind, el("span", name(block.name), class_="name")))
    if not block.parts:
        return head
    return el("details", el("summary", head), el("ul", *(_part(*part) for part in block.parts)), class_="parts")


def _part(words: str, names: Sequence[str]) -> Markup:
    more = len(names) - LISTED
    listed = [child for one in names[:LISTED] for child in (", ", name(one))][1:]
    return el("li", el("b", words), " ", *listed, f" and {more} more" if more > 0 else None)


def _units(block: BlockRow) -> list[Child]:
    noun = block.noun + ("" if block.units == 1 else "s")
    wide = f"each {block.unit_size} wide" if block.unit_size > 1 else ""
    if block.kept == block.units:
        return [el("span", f"{block.units:,} {noun}"), el("span", wide, class_="sub") if wide else None]
    left = ", ".join(part for part in (f"{figures.share(block.share, 0)} left", wide) if part)
    return [el("span", f"{block.units:,} → {block.kept:,} {noun}"), el("span", left, class_="sub")]


def _errors(block: BlockRow) -> Markup:
    """Return the errors of a block as a drawing and in words."""
    known = (("before", block.plain), ("after", block.compensated), ("validation", block.validation))
    words = [el("span", f"{label} ", el("b", figures.error(e))) for label, e in known if e is not None]
    if block.outcome:
        words.append(el("span", block.outcome, class_="why"))
    if not words:
        words.append(el("span", "all kept" if block.kept == block.units else "not measured"))
    return join((drawing.dumbbell(block), el("span", *words, class_="sub words")))


def _held(block: BlockRow, total: tuple[float | None, float | None]) -> Markup:
    words = []
    for label, value, whole in (("parameters", block.params, total[0]), ("MACs", block.macs, total[1])):
        if value is not None and whole:
            words.append(el("span", el("b", figures.share(value / whole)), f" of {label}"))
    share = block.params / total[0] if block.params is not None and total[0] else 0.0
    return join((drawing.bar(share, "fill"), el("span", *words, class_="sub words")))


def _left(row: LeftRow, *, again: bool) -> Markup:
    """Return the row of a place left alone; `again`: the previous such row has the same reason."""
    more = len(row.nodes) - NAMED
    nodes = ", ".join(row.nodes[:NAMED]) + (f" and {more} more" if more > 0 else "")
    why = ", same reason" if again else f": {row.reason}"
    return el(
        "tr",
        el("td", el("b", "Left alone"), " at ", name(nodes), why, colspan=4, role="cell"),
        class_="left",
        role="row",
        data_kind=LEFT,
    )


def _rows(
    rows: tuple[Row, ...], widest: int, total: tuple[float | None, float | None], *, narrowed: bool
) -> list[Markup]:
    drawn = []
    reason = None
    for row in rows:
        if isinstance(row, BlockRow):
            drawn.append(_block(row, widest, total, narrowed=narrowed))
        else:
            drawn.append(_left(row, again=row.reason == reason))
            reason = row.reason
    return drawn
