"""The top of the page: the model, the result in numbers, an overview of the network, and the checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrail.fidelity.words import SAYS_NOTHING, headline_of, speed
from onnxgrail.report.page.brief import BUDGETS
from onnxgrail.report.page.html import drawing, figures
from onnxgrail.report.page.html.markup import Child, Markup, el, join, name
from onnxgrail.report.page.network import BlockRow, blocks_of, kinds_of, rows_of
from onnxgrail.report.summary import SHARES, judged, loss_name, loss_of

ONCE = "measured once, no interval"


def title_of(path: str) -> str:
    """Return a file's name without its folders."""
    return re.split(r"[/\\]", path)[-1] or path


def hero(data: Mapping[str, Any]) -> Markup:
    """Return the top of the page of a report."""
    return el("header", brand("report"), el("h1", name(title_of(data["model"]["input"]))), *overview(data))


def overview(data: Mapping[str, Any]) -> tuple[Markup | None, ...]:
    """Return the result of a run at a glance: a sentence, the network, the cards, the checks."""
    blocks = blocks_of(rows_of(data))
    return (
        el("p", _lead(data, blocks), class_="lead"),
        _figure(blocks, narrowed=True),
        el("div", *cards_of(data), class_="cards"),
        _checks(data),
    )


def inspection_hero(data: Mapping[str, Any]) -> Markup:
    """Return the top of the page of an inspection."""
    blocks = blocks_of(rows_of(data))
    held = (data.get("shares") or {}).get("all") or {}
    cards = [
        card("File size", figures.size(data["bytes"])),
        card("Parameters", figures.count(data["params"]), f"{figures.share(held.get('params'))} in blocks"),
        card("MACs per sample", figures.count(data["macs"]), f"{figures.share(held.get('macs'))} in blocks"),
        card("Blocks", figures.count(len(blocks)), figures.plural(len(data["refusals"]), "place") + " left alone"),
    ]
    lead = f"{figures.plural(len(blocks), 'block')} can be narrowed." if blocks else "No block can be narrowed."
    return el(
        "header",
        brand("inspection"),
        el("h1", name(title_of(data["path"]))),
        el("p", lead, class_="lead"),
        _figure(blocks, narrowed=False),
        el("div", *cards, class_="cards"),
    )


def brand(kind: str) -> Markup:
    """Return the line above the title, with the kind of the page."""
    return el("p", el("strong", "onnxgrail"), f" {kind}", class_="brand")


def _lead(data: Mapping[str, Any], blocks: Sequence[BlockRow]) -> Markup:
    model = data["model"]
    cut = sum(block.kept < block.units for block in blocks)
    of = f"{cut} of {figures.plural(len(blocks), 'block')}"
    asked = _asked(data)
    verb = "would be" if model.get("output") is None else "were"
    removed = figures.share(model["model_ratio"])
    return el(
        "span",
        f"{of} {verb} narrowed{f': asked {asked}' if asked else ''}. That is {removed} of all parameters of the model.",
    )


def _asked(data: Mapping[str, Any]) -> str:
    """Return the requested amount and the achieved one in words; empty if no amount was requested."""
    model = data["model"]
    budget, search = model.get("budget"), (data.get("allocation") or {}).get("search")
    if budget:
        show = BUDGETS.get(budget["metric"], figures.count)
        return f"for {budget['metric']} of at most {show(budget['limit'])}, achieved {show(budget['achieved'])}"
    if search:
        loss = loss_of(data)
        told = "" if loss is None else f", measured {figures.error(loss['mean'])} ({loss_name(loss)})"
        return f"for a loss of at most {figures.error(search['limit'])}{told}"
    if model.get("asked_ratio") is None:
        return ""
    share, achieved = figures.share(model["asked_ratio"]), figures.share(model["achieved_ratio"])
    return f"to remove {share} of {SHARES.get(model['ratio_of'], 'all parameters')}, achieved {achieved}"


def _figure(blocks: Sequence[BlockRow], *, narrowed: bool) -> Markup | None:
    if not blocks:
        return None
    said = f"{figures.plural(len(blocks), 'block')} in the order of the network"
    if narrowed:
        least = min(blocks, key=lambda block: block.share)
        said += f"; the narrowest keeps {figures.share(least.share, 0)} of its width ({least.name})"
    keys = [el("li", swatch(f"is k-{kind}"), words) for kind, words in kinds_of(blocks).items()]
    if narrowed:
        keys.append(el("li", swatch("was"), "removed"))
    return el(
        "figure",
        drawing.silhouette(blocks, said),
        el("figcaption", el("span", "input → output, one bar per block"), el("ul", *keys, class_="keys")),
        class_="overview",
        aria_label="The network at a glance",
    )


def swatch(style: str, size: int = 12) -> Markup:
    """Return a color sample for a legend."""
    shape = el("rect", x=1, y=1, width=size - 2, height=size - 2, rx=2, class_=style)
    return el("svg", shape, width=size, height=size, aria_hidden="true", focusable="false")


def _checks(data: Mapping[str, Any]) -> Markup | None:
    """Return the checks of the result, each with a word in addition to its color."""
    found = data.get("verification") or {}
    limit = (data.get("recipe") or {}).get("min_cosine")
    cosines = [o["cosine"] for o in judged(data) if o.get("cosine") is not None]
    gate = None if limit is None else bool(cosines) and min(cosines) >= limit
    checks = (
        ("ONNX checker", found.get("checker")),
        ("ONNX Runtime loads it", found.get("ort_load")),
        (f"cosine at least {limit}", gate),
    )
    items = [
        el(
            "li",
            el("span", "✓" if good else "✗", aria_hidden="true"),
            f" {what}: {'passed' if good else 'failed'}",
            class_="good" if good else "bad",
        )
        for what, good in checks
        if good is not None
    ]
    if data["model"].get("output") is None:
        items.append(el("li", "dry run: no model was written, sizes are predicted"))
    return el("ul", *items, class_="checks", aria_label="Checks") if items else None


def card(label: str, value: str, note: Child = None, share: float | None = None, *, silent: bool = False) -> Markup:
    """Return a card with a number and its name; `share` adds a bar, `silent` marks a number without significance."""
    return el(
        "div",
        el("p", label, class_="label"),
        el("p", value, class_="value"),
        None if share is None else drawing.bar(share, "fill", height=6),
        None if note is None else el("p", note, class_="note"),
        class_="card silent" if silent else "card",
    )


def cards_of(data: Mapping[str, Any]) -> list[Markup]:
    """Return the cards for sizes, latency and fidelity of a report."""
    model = data["model"]
    found = []
    for label, key, show in (
        ("File size", "bytes", figures.size),
        ("Parameters", "params", figures.count),
        ("MACs per sample", "macs", figures.count),
    ):
        before, after = model.get(f"{key}_before"), model.get(f"{key}_after")
        left = None if not before or after is None else after / before
        found.append(card(label, figures.change(before, after), f"{show(before)} → {show(after)}", left))
    return [*found, *_latency(data), *_fidelity(data)]


def _latency(data: Mapping[str, Any]) -> list[Markup]:
    steps, budget = data.get("latency") or (), data["model"].get("budget") or {}
    times = [step["median"] for step in steps]
    if not times and budget.get("metric") == "latency":
        times = [budget["before"], budget["achieved"]]
    if not times:
        return []
    first, last = map(figures.milliseconds, (times[0], times[-1]))
    found, change = speed(steps), figures.change(times[0], times[-1])
    if found is None:
        return [card("Latency", change, f"{first} → {last}; {ONCE}", silent=True)]
    note = f"{first} → {last}; {found.between} times as fast"
    if found.silent:
        return [card("Latency", SAYS_NOTHING, note, silent=True)]
    return [card("Latency", change, note, times[-1] / times[0])]


def _fidelity(data: Mapping[str, Any]) -> list[Markup]:
    headline = headline_of(data)
    if headline is None:
        return []
    if headline.silent:
        return [card("Fidelity", "not known", headline.caveat, silent=True)]
    place = f" on {headline.where}" + (f"; {headline.caveat}" if headline.caveat else "")
    note = join((f"{figures.words(headline.extent)}; ", name(headline.output), place))
    return [card(headline.measure, figures.words(headline.value), note, headline.share)]
