"""Result lines of the steps after narrowing: simplification, quantization, check for a runtime."""

from __future__ import annotations

from typing import Any

from . import render

SHOWN = 8  # findings that are printed; the report has all


def lines(data: Any) -> list[str]:
    """Return lines on simplification, quantization and the check for a runtime; empty if none was requested."""
    return [*_simplified(data.get("simplify")), *_quantised(data.get("quantization")), *_target(data.get("target"))]


def latency(steps: Any, speed: Any) -> None:
    """Print the latency per run, and the speedup with its uncertainty."""
    times = ", ".join(f"{step['name']} {render.number(step['median'], '.3g')} ms" for step in steps or ())
    if times:
        said = "" if speed is None else f": {speed}"
        render.say(f"Latency of one run: {times}{said}", dim=speed is None or speed.silent)


def _simplified(entry: Any) -> list[str]:
    return [] if entry is None else [f"Simplified: {entry['nodes_before']} -> {entry['nodes_after']} nodes"]


def _quantised(entry: Any) -> list[str]:
    if entry is None:
        return []
    sizes = f"{render.size(entry['bytes_before'])} -> {render.size(entry['bytes_after'])}"
    return [f"Quantized to {entry['kind']}: {sizes}{_kept(entry)}"]


def _kept(entry: Any) -> str:
    names, reason = entry["kept_float"], entry.get("kept_float_reason") or "outliers in their inputs"
    return f"; kept in float: {render.several(len(names), 'node')} ({reason})" if names else ""


def _target(entry: Any) -> list[str]:
    if entry is None:
        return []
    head = f"Target {entry['table']} (table of {entry['date']}): "
    found = [head + ("no problem found" if entry["passed"] else "it would refuse this model")]
    for one in entry["findings"][:SHOWN]:
        where = f"{one['op']} {one['node']}: ".strip(" ") if one["op"] else ""
        found.append(f"  {one['level']}: {where}{' ' if where else ''}{one['reason']}")
    if len(entry["findings"]) > SHOWN:
        found.append(f"  and {len(entry['findings']) - SHOWN} more (see --report)")
    return found


def gates(data: Any) -> list[str]:
    """Return the failed gates of the steps after narrowing."""
    target = data.get("target")
    if target is None or not target["strict"] or target["passed"]:
        return []
    problems = [one for one in target["findings"] if one["level"] == "problem"]
    return [f"{target['table']} would refuse the model: {len(problems)} problems"]
