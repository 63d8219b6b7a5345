"""Sections with numbers: before and after, latency, repairs, time, refusals, notes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrail.fidelity.words import advice, speed
from onnxgrail.report.page.brief import summary
from onnxgrail.report.page.html import drawing, figures
from onnxgrail.report.page.html.markup import Child, Markup, el, join, name
from onnxgrail.report.page.html.table import section, table
from onnxgrail.report.page.network import places

STAGES = {
    "load": "read the model",
    "data": "read the data",
    "observe": "run it once for shapes and values",
    "trace": "find what belongs together",
    "prove": "try that blocks can be narrowed exactly",
    "measure": "statistics of the original",
    "gradients": "gradients of the original",
    "allocate": "choose widths",
    "curves": "error of each block at other widths",
    "calibrate": "choose what stays and repair the weights",
    "norms": "fit normalizations",
    "narrow": "cut the weights",
    "refine": "fit by gradient",
    "methods": "other methods",
    "verify": "compare the outputs",
    "simplify": "simplify the graph",
    "quantize": "quantize",
    "latency": "time the models",
    "write": "write the model",
}
OPTION = re.compile(r"((?<![\w-])--[a-z][a-z-]*)")
REFINED = {"laco": "Blocks fitted by gradient (laco)", "distill": "Whole model fitted by gradient (distill)"}
BROUGHT = {
    "repair": "Mean and deviation of activations after convolutions restored (repair)",
    "refit": "Scale and bias of normalizations fitted (refit)",
}


def sizes(data: Mapping[str, Any]) -> Markup:
    """Return the section with the before/after table."""
    columns = ("", "Before", "After", "Change")
    shown = table("Size of the model and of its blocks", columns, summary(data), class_="numbers")
    return section("sizes", "Before and after", shown)


def predicted(data: Mapping[str, Any]) -> Markup | None:
    """Return the section on the predicted sizes after narrowing at a few ratios; None if there are none."""
    guesses = data.get("predicted") or ()
    if not guesses:
        return None
    named = {f"{figures.share(g['ratio'], 0)} of the parameters in these blocks removed": g for g in guesses}
    rows = [
        (label, figures.count(costs["params"]), figures.count(costs["macs"]), figures.size(costs["bytes"]))
        for label, costs in ({"as it is": data} | named).items()
    ]
    columns = ("", "Parameters", "MACs", "File size")
    caption = "Predicted for the usual blocks, nothing else changed; MACs for random inputs (--input-shapes)"
    return section("predicted", "What narrowing would save", table(caption, columns, rows, class_="numbers"))


def latency(data: Mapping[str, Any]) -> Markup | None:
    """Return the section on measured times; None if latency was not measured."""
    budget = data["model"].get("budget") or {}
    target = budget if budget.get("metric") == "latency" else {}
    steps = [(str(step["name"]), step["median"], str(speed([step]) or "")) for step in data.get("latency") or ()]
    if target and not steps:
        steps = [("original", target["before"], ""), ("narrowed", target["achieved"], "")]
    if not steps:
        return None
    bars = [(name_.capitalize(), ms, "fill" if n else "ghost", note) for n, (name_, ms, note) in enumerate(steps)]
    if target:
        bars.insert(1, ("Limit", target["limit"], "limit", f"asked: {target['asked']}"))
    longest = max(ms for _, ms, _, _ in bars)
    rows: list[Sequence[Child]] = [
        (
            label if not note else join((label, el("span", note, class_="sub"))),
            drawing.bar(ms / longest, style, height=14),
            figures.milliseconds(ms),
        )
        for label, ms, style, note in bars
    ]
    caption = "Median time of one run, measured in turn on the machine that made this report"
    return section("latency", "Latency", table(caption, ("", "", "Time"), rows, class_="bars"))


def repairs(data: Mapping[str, Any]) -> Markup | None:
    """Return the section on fits beyond the blocks' own compensation; None if there were none."""
    rows: list[Sequence[Child]] = []
    refits = data.get("refits") or ()
    if refits:
        better = [r for r in refits if r["after"] is not None and r["before"] is not None and r["after"] < r["before"]]
        rows.append(("Layers fitted to the original network", f"{len(better)} of {len(refits)}", *_means(better)))
    for kind, label in BROUGHT.items():
        every = [n for n in data.get("norms") or () if n["kind"] == kind]
        if every:
            good = [n for n in every if n["outcome"]["status"] == "ok"]
            rows.append((label, f"{len(good)} of {len(every)}", *_means(good)))
    for kind, label in REFINED.items():
        every = [r for r in data.get("refines") or () if r["kind"] == kind]
        for entry in every:
            if entry["block"] == "model":
                parts = [r for r in every if r["block"] != "model"]
                taken = sum(r["outcome"]["status"] == "ok" for r in parts)
                of = f"{taken} of {len(parts)}" if parts else figures.seconds(entry["seconds"])
                rows.append((label, of, figures.error(entry["before"]), figures.error(entry["after"])))
    if not rows:
        return None
    columns = ("", "Improved", "Error before", "Error after")
    caption = "Mean error of those improved, on data left out of the fit"
    return section("repairs", "Repairs", table(caption, columns, rows, class_="numbers"))


def _means(entries: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    if not entries:
        return figures.NONE, figures.NONE
    before, after = (sum(e[key] for e in entries) / len(entries) for key in ("before", "after"))
    return figures.error(before), figures.error(after)


def time(data: Mapping[str, Any]) -> Markup | None:
    """Return the section on the seconds per stage; `forward` is left out, because it is a part of other stages."""
    stages = {k: v for k, v in (data.get("timing") or {}).items() if k != "forward" and v >= 0.005}
    if not stages:
        return None
    total = sum(stages.values())
    rows: list[Sequence[Child]] = [
        (
            join((stage, el("span", STAGES[stage], class_="sub"))) if stage in STAGES else stage,
            drawing.bar(seconds / total, "fill"),
            figures.seconds(seconds),
        )
        for stage, seconds in stages.items()
    ]
    peak = data.get("peak_rss_bytes")
    memory = f"; memory at most {figures.size(peak)}" if peak else ""
    longest = max(stages, key=lambda stage: stages[stage])
    most = f", most of it {STAGES.get(longest, longest)} ({figures.seconds(stages[longest])})"
    head = el("summary", el("b", figures.seconds(total)), most + memory)
    caption = "Time of each stage"
    return section(
        "time", "Time", el("details", head, table(caption, ("Stage", "", "Time"), rows, class_="bars small"))
    )


def left_alone(data: Mapping[str, Any], limit: int = 200) -> Markup | None:
    """Return the section on refusals: reasons, the most frequent first, each with up to `limit` nodes."""
    refusals = data.get("refusals") or ()
    if not refusals:
        return None
    items = []
    for reason, times in Counter(str(r["reason"]) for r in refusals).most_common():
        nodes = places(r for r in refusals if str(r["reason"]) == reason)
        shown = [el("li", name(node)) for node in nodes[:limit]]
        if len(nodes) > limit:
            shown.append(el("li", f"and {len(nodes) - limit} more"))
        head = el("summary", el("b", f"{times:,} ×"), f" {reason}")
        items.append(el("details", head, el("ul", *shown, class_="nodes")))
    text = "Channels that stay as they are: how many, why (“it” is the group of channels), and at which nodes."
    return section("left", "Left alone", el("p", text), *items, long=True)


def notes(data: Mapping[str, Any]) -> Markup | None:
    """Return the section with notes for the user; None if there are none."""
    calibration = data.get("calibration") or {}
    lines = list(dict.fromkeys([*(calibration.get("notes") or ()), *(data.get("notes") or ()), *advice(data)]))
    return section("notes", "Notes", el("ul", *(el("li", *_whole(line)) for line in lines))) if lines else None


def _whole(line: str) -> list[Child]:
    """Return a line whose options, such as `--selector`, do not break after a hyphen."""
    parts = OPTION.split(figures.words(line))
    return [el("span", part, class_="option") if number % 2 else part for number, part in enumerate(parts)]
