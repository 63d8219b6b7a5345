"""`--effort`: the choices that depend on how much time a result may take, where the user made none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

EFFORTS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"compensate": "grail"},
    "normal": {},
    "max": {"selector": "obs", "allocate": "global", "refine": ("laco", "distill")},
}
"""Choices by effort, in addition to the defaults of `Recipe`."""


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices with those that follow from the effort; a choice of the user is never replaced.

    Without compensation, `auto` and no selector mean `wanda`: `obs` scores units as if the weights were fitted
    afterwards. The search for `--max-loss` chooses the widths itself. Refinements need torch and a compensation.
    """
    choices = {**EFFORTS.get(given.get("effort", "normal"), {}), **given}
    if given.get("max_loss") is not None and "allocate" not in given:
        choices.pop("allocate", None)
    plain = choices.get("compensate") == "none"
    if plain and given.get("selector", "auto") == "auto":
        choices["selector"] = "wanda"
    if "refine" not in given and (plain or find_spec("torch") is None):
        choices.pop("refine", None)
    return choices
