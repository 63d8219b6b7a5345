"""Sections on the steps after narrowing: low rank, simplification, quantization, check against a runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrail.report.page.html import figures
from onnxgrail.report.page.html.markup import Child, Markup, el, name
from onnxgrail.report.page.html.table import section, table


def low_rank(data: Mapping[str, Any]) -> Markup | None:
    """Return the section on layers replaced by low rank, the most redundant first; None if there are none."""
    entry = (data.get("methods") or {}).get("grasp")
    layers = [layer for layer in (entry or {}).get("layers") or () if layer["replaced"]]
    if not entry or not layers:
        return None
    before, after = (sum(m[f"params_{side}"] for m in entry["matrices"]) for side in ("before", "after"))
    rows: list[Sequence[Child]] = [
        (name(str(layer["name"])), figures.number(layer["redundancy"], ".4f")) for layer in layers
    ]
    text = (
        f"{figures.plural(len(entry['matrices']), 'matrix')} of these layers keep "
        f"{figures.share(after / before if before else None)} of their parameters."
    )
    caption = "Cosine of what goes into a layer and what comes out: near 1, the layer does little"
    return section("lowrank", "Low rank", el("p", text), table(caption, ("Layer", "Cosine"), rows))


def deployment(data: Mapping[str, Any]) -> Markup | None:
    """Return the section on the steps after narrowing and on the limits of a runtime; None if there were none."""
    steps = _steps(data)
    target = data.get("target")
    if not steps and target is None:
        return None
    parts: list[Child] = []
    if steps:
        parts.append(
            table("What followed the narrowing", ("Step", "Before", "After", "Change"), steps, class_="numbers")
        )
    entry = data.get("quantization") or {}
    kept, reason = entry.get("kept_float") or (), entry.get("kept_float_reason") or "outliers in their inputs"
    if kept:
        title = f"Kept in float: {figures.plural(len(kept), 'node')} ({reason})"
        nodes = el("ul", *(el("li", name(str(one))) for one in kept), class_="nodes")
        parts.append(el("details", el("summary", title), nodes))
    if target is not None:
        said = "no problem found" if target["passed"] else "it would refuse this model"
        parts.append(el("h3", f"{target['table']}, table of {target['date']}: {said}"))
        parts += [_finding(one) for one in target["findings"][:50]]
    return section("deployment", "To deployment", *parts)


def _steps(data: Mapping[str, Any]) -> list[Sequence[Child]]:
    rows: list[Sequence[Child]] = []
    simplified, quantised = data.get("simplify"), data.get("quantization")
    if simplified:
        nodes = simplified["nodes_before"], simplified["nodes_after"]
        rows.append(("Simplified: nodes", *map(figures.count, nodes), figures.change(*nodes)))
    if quantised:
        size = quantised["bytes_before"], quantised["bytes_after"]
        rows.append((f"Quantized to {quantised['kind']}: bytes", *map(figures.size, size), figures.change(*size)))
    return rows


def _finding(one: Mapping[str, Any]) -> Markup:
    where = f"{one.get('op') or ''} {one.get('node') or ''}".strip()
    return el("p", el("b", f"{one['level']}: "), name(where) if where else None, " " if where else None, one["reason"])
