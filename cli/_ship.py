"""What follows the narrowing on the way to a server: options, and the lines that say how it went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import _close as close
from . import _options as options
from . import _render as render

QUANTIZE = ("none", "int8", "int8-dynamic", "fp16")
TARGETS = ("tensorrt",)
SHOWN = 8  # findings printed; the report has them all

ship_options = options.chain(
    click.option("--simplify", is_flag=True, help="Then fold and fuse what is left with onnxslim (extra `simplify`)."),
    click.option(
        "--quantize",
        type=click.Choice(QUANTIZE),
        default="none",
        show_default=True,
        help="Last, store and compute in fewer bits: int8 with ranges from the calibration data, int8 with ranges "
        "found at run time, or half precision.",
    ),
    click.option(
        "--target", "runtime", type=click.Choice(TARGETS), help="Say what this runtime would refuse or be slow with."
    ),
    click.option("--strict", is_flag=True, help="Exit 3 when --target would refuse the model; it is still written."),
    click.option(
        "--save-recipe",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Keep all choices in a file, .yaml or .json, for `onnxgrail apply`.",
    ),
)


def lines(data: Any) -> list[str]:
    """How simplifying, quantising and the check for a runtime went; nothing where nobody asked."""
    return [
        *_simplified(data.get("simplify")),
        *_quantised(data.get("quantization")),
        *_latency(data.get("latency")),
        *_target(data.get("target")),
    ]


def _simplified(entry: Any) -> list[str]:
    return [] if entry is None else [f"Simplified: {entry['nodes_before']} -> {entry['nodes_after']} nodes"]


def _quantised(entry: Any) -> list[str]:
    if entry is None:
        return []
    sizes = f"{render.size(entry['bytes_before'])} -> {render.size(entry['bytes_after'])}"
    found = [f"Quantised to {entry['kind']}: {sizes}{_kept(entry)}"]
    narrowed = {check["name"]: check for check in entry["to_narrowed"]}
    for check in close.worst(entry["outputs"]):
        words = [f"cosine {render.number(check['cosine'], '.5f')}, NMSE {render.number(check['nmse'], '.2e')}"]
        if check.get("agreement") is not None:
            words.append(f"top-1 agreement {render.share(check['agreement'])}")
        other = render.number(narrowed[check["name"]]["cosine"], ".5f")
        found.append(
            f"Output {check['name']}, quantised: {', '.join(words)} to the original; cosine {other} to the narrowed"
        )
    for check in close.worst((entry.get("held_out") or {}).get("outputs", ())):
        numbers = f"cosine {render.number(check['cosine'], '.5f')}, NMSE {render.number(check['nmse'], '.2e')}"
        where = f"on {check['samples']} held-out samples"
        found.append(f"Output {check['name']}, quantised: {numbers} to the original {where}{render.scores(check)}")
    return found


def _latency(steps: Any) -> list[str]:
    times = ", ".join(f"{step['name']} {render.number(step['median'], '.3g')} ms" for step in steps or ())
    return [f"Latency of one sample: {times}"] if times else []


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
    """What failed among the gates that stand behind the narrowing."""
    target = data.get("target")
    if target is None or not target["strict"] or target["passed"]:
        return []
    problems = [one for one in target["findings"] if one["level"] == "problem"]
    return [f"{target['table']} would refuse the model: {len(problems)} problems"]
