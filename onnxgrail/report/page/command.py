"""The section on repeating a run: the command line of a recipe, and the versions that the numbers depend on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from onnxgrail.recipe.table import AMOUNTS, FIELDS
from onnxgrail.report.page.html import figures
from onnxgrail.report.page.html.markup import Markup, el
from onnxgrail.report.page.html.table import section, table

RECIPE = "recipe.json"  # stands for a file of a recipe in commands
IN_MEMORY = re.compile(r"(arrays?|feeds?)\b(?!\.\w)")


def command_of(data: Mapping[str, Any]) -> str:
    """Return the command line that repeats a run: options that differ from the defaults, and always the amount.

    Given widths have no option: such a run is repeated from its recipe, in a file.
    """
    recipe, model = data.get("recipe") or {}, data["model"]
    given = _given_widths(data)
    words = [["onnxgrail", *(("apply", RECIPE) if given else ("compress",)), str(model["input"])]]
    if model.get("output"):
        words.append(["--output", str(model["output"])])
    calibration = data.get("calibration") or {}
    if calibration.get("source") and not calibration.get("synthetic"):
        words.append(["--data", "DATA" if _in_memory(data) else str(calibration["source"])])
    verification = data.get("verification") or {}
    held = str((verification.get("judged") or verification.get("held_out") or {}).get("asked") or "auto")
    if held != "auto":
        words.append(["--held-out", "OTHER_DATA" if IN_MEMORY.match(held) else held])
    words += [] if given else options_of(recipe)
    if (data.get("allocation") or {}).get("curves"):
        words.append(["--curves"])
    if not model.get("output"):
        words.append(["--dry-run"])
    return " \\\n  ".join(shlex.join(group) for group in words)


def options_of(recipe: Mapping[str, Any]) -> list[list[str]]:
    """Return the options of a recipe that differ from the defaults, and always the amount."""
    defaults, words = {name: _plain(row.default) for name, row in FIELDS.items()}, []
    for name in AMOUNTS:
        if recipe.get(name) is not None:
            words += _option(name, recipe[name])
    for name, value in recipe.items():
        if name not in AMOUNTS and name in defaults and _plain(value) != defaults[name]:
            words += _option(name, value)
    return words


def _given_widths(data: Mapping[str, Any]) -> bool:
    return (data.get("recipe") or {}).get("widths") is not None


def _in_memory(data: Mapping[str, Any]) -> bool:
    """Return True if the data were arrays of a Python call and have no file."""
    return bool(IN_MEMORY.match(str((data.get("calibration") or {}).get("source"))))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _option(name: str, value: Any) -> list[list[str]]:
    """Return the command line option of a choice."""
    row = FIELDS[name]
    label = row.spelled
    if value is None:
        return []
    if isinstance(value, bool):
        return [[label if value else row.off]]
    if row.value.kind == "shapes":
        return [[label, f"{key}:{','.join(map(str, shape))}"] for key, shape in value.items()]
    if row.value.kind in ("contents", "names"):
        words = [f"{key}={word}" for key, word in value.items()] if isinstance(value, Mapping) else value
        return [[label, str(word)] for word in words]
    if row.value.kind == "portion":
        text = f"{100 * value:g}%"
    elif isinstance(value, list | tuple):
        text = ",".join(map(str, value)) or row.value.empty
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return [[label, text]]


def again(data: Mapping[str, Any]) -> Markup:
    """Return the section with the command, the recipe and the identity of the files."""
    recipe = json.dumps(data.get("recipe") or {}, indent=1, ensure_ascii=False)
    return section(
        "again",
        "Do it again",
        el("p", "The data were arrays of a Python call; DATA stands for a file of them.") if _in_memory(data) else None,
        el("p", f"{RECIPE} is a file with the whole recipe, which follows.") if _given_widths(data) else None,
        copied("command", command_of(data)),
        el("details", el("summary", "The whole recipe"), copied("recipe", recipe)),
        el("details", el("summary", "Files and versions"), _identity(data)),
        long=True,
    )


def copied(identity: str, text: str) -> Markup:
    """Return text with a button that copies it; the button is visible only if scripts run."""
    button = el("button", "Copy", type="button", class_="copy", data_copy=identity, hidden=True, aria_live="polite")
    code = el("pre", el("code", text, id=identity), tabindex=0, role="region", aria_label=identity)
    return el("div", code, button, class_="copied")


def _identity(data: Mapping[str, Any]) -> Markup:
    model, tool = data["model"], data.get("tool") or {}
    environment = data.get("environment") or {}
    rows = [("onnxgrail", str(tool.get("version") or figures.NONE))]
    rows += [(key, str(environment.get(key) or figures.NONE)) for key in ("python", "onnx", "onnxruntime", "numpy")]
    rows.append(("providers", ", ".join(environment.get("providers") or ()) or figures.NONE))
    rows += [
        (f"SHA-256 of the {label}", str(model.get(f"sha256_{key}") or figures.NONE))
        for label, key in (("original", "before"), ("narrowed model", "after"))
    ]
    for key in ("before", "after"):
        rows += [(f"SHA-256 of {file}", str(sum_)) for file, sum_ in (model.get(f"sha256_data_{key}") or {}).items()]
    calibration = data.get("calibration") or {}
    if calibration:
        rows.insert(0, ("calibration", f"{calibration['samples']:,} samples, {calibration['source']}"))
    held = (data.get("verification") or {}).get("held_out")
    if held:
        rows.insert(1, ("held out", f"{held['samples']:,} samples, {held['source']}"))
    return table("What the numbers depend on", ("", "Value"), rows, class_="facts")
