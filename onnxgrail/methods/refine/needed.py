"""Checks the choices and requirements of refinements and gradient selectors, before any of them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrail.algebra.select.selectors import GRADIENTS
from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.machine.extras import require
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.choices import RefineChoices

USED = frozenset(RefineChoices.__annotations__)
DEFAULT = ("laco", "distill")


def require_torch(recipe: Recipe) -> None:
    """Check that the requested refinements and selector can run.

    Raises:
        MissingExtraError: gradients are needed, and torch is not installed.
    """
    gradients = f"--selector {recipe.selector}" if recipe.selector in GRADIENTS else ""
    what = f"--refine {','.join(recipe.refine)}" if recipe.refine else gradients
    if what:
        require("torch", "torch", f"{what} needs torch")


def recipe_of_fit(choices: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a fit of a given small model, which narrows nothing.

    Raises:
        UsageError: an option is unknown, out of range, or does not apply to fits.
        MissingExtraError: torch is not installed.
    """
    odd = sorted(n for n, value in choices.items() if value is not None and n not in USED)
    if odd:
        raise UsageError(f"refining has no option {odd[0]!r}", hint=f"Known options: {', '.join(sorted(USED))}")
    given = {"refine": DEFAULT, **{n: value for n, value in choices.items() if value is not None}}
    recipe = recipe_of({**given, "ratio": 0.0})
    if not recipe.refine:
        raise UsageError("no refinement is chosen", hint="Leave out --refine, or give it a kind")
    require_torch(recipe)
    return recipe
