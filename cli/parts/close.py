"""Print the fidelity of the result: the line on the worst output, and advice if it is far off."""

from __future__ import annotations

from typing import Any

from . import render


def headline(found: Any) -> None:
    """Print the verdict on the worst output, unless nothing was compared (None)."""
    if found is not None:
        render.say(f"Fidelity: {found}", dim=found.silent)


def advice(found: Any, recipe: Any) -> list[str]:
    """Return suggestions for a result that is far from the original, given the recipe it was made with."""
    if found is None or not found.far:
        return []
    far = f"output {found.output} is far from the original ({found.measure} {found.value})"
    ways = ["more real --data", *_ways(recipe)]
    return [f"{far}: {' or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))} bring it closer"]


def _ways(recipe: Any) -> list[str]:
    """Return options under which less goes, or other units; none if nothing goes."""
    amounts = ("ratio", "unit_ratio", "max_loss", *(key for key in recipe if key.startswith("target_")))
    asked = next((key for key in amounts if recipe.get(key) is not None), "ratio")
    if recipe.get(asked) == 0:
        return []
    less = f"a {'larger' if asked.startswith('target') else 'smaller'} --{asked.replace('_', '-')}"
    return [less] if recipe.get("selector") == "obs" else [less, "--selector obs"]
