"""Checks the requirements of refinements and gradient selectors, before any of them is imported."""

from __future__ import annotations

import importlib.util

from onnxgrail.algebra.select.selectors import GRADIENTS
from onnxgrail.core import Recipe
from onnxgrail.errors import MissingExtraError


def require_torch(recipe: Recipe) -> None:
    """Check that the requested refinements and selector can run.

    Raises:
        MissingExtraError: gradients are needed, and torch is not installed.
    """
    gradients = f"--selector {recipe.selector}" if recipe.selector in GRADIENTS else ""
    what = f"--refine {','.join(recipe.refine)}" if recipe.refine else gradients
    if what and importlib.util.find_spec("torch") is None:
        raise MissingExtraError(
            f"{what} needs torch, which is not installed",
            hint="Run: pip install 'onnxgrail[torch]'",
        )
