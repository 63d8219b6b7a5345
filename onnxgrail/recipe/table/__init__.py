"""The table of options: keywords, checks, recipe files, the command line and its reference follow from it.

To add an option: a field of `Recipe` (if it belongs to the recipe), a row here, and its type in `recipe/choices.py`.
Nothing heavy is imported, because `--help` reads the table.
"""

from __future__ import annotations

from dataclasses import fields, replace

from onnxgrail.options import Recipe
from onnxgrail.recipe.effort import EFFORTS
from onnxgrail.recipe.table import choosing, running
from onnxgrail.recipe.table.option import Option

GROUPS = {
    "What to remove": choosing.REMOVE,
    "Data": running.DATA,
    "How it is compensated": choosing.COMPENSATE,
    "Refine (needs torch)": choosing.REFINE,
    "Output": running.OUTPUT,
    "Checks and report": running.REPORT,
    "Machine": running.MACHINE,
}
"""The rows of each heading of `--help`, in order."""

_DEFAULTS = {field.name: getattr(Recipe(), field.name) for field in fields(Recipe)}
OPTIONS: dict[str, Option] = {
    row.name: replace(row, group=group, default=_DEFAULTS.get(row.name))
    for group, rows in GROUPS.items()
    for row in rows
}
"""All options by name."""
FIELDS = {name: OPTIONS[name] for name in _DEFAULTS}
"""The options that are fields of `Recipe`, in their order."""
AMOUNTS = (
    "max_loss",
    "ratio",
    "unit_ratio",
    "target_params",
    "target_macs",
    "target_size",
    "target_latency",
    "widths",
)
"""The options of which at most one is given: how much is removed."""
FILLED = frozenset(name for choices in EFFORTS.values() for name in choices)
"""The options that `effort` decides where nobody gives them, see `recipe/effort.py`."""
