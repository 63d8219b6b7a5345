"""The cards at the top of the page: each number with its interval or caveat, gray if it is not significant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrail.fidelity.words import SAYS_NOTHING, Headline, headline_of, speed
from onnxgrail.report.page.html import drawing, figures
from onnxgrail.report.page.html.markup import Child, Markup, el, join, name

ONCE = "measured once, no interval"


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
    return [card(headline.measure, figures.words(headline.value), _note(headline), headline.share)]


def _note(headline: Headline) -> Markup:
    """Return interval, output and samples of the headline, and its caveat."""
    place = f" on {headline.where}" + (f"; {headline.caveat}" if headline.caveat else "")
    return join((f"{figures.words(headline.extent)}; ", name(headline.output), place))
