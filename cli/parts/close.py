"""How close the result is to the original: the line on the worst output, and what to do where it is far off."""

from __future__ import annotations

from typing import Any

from . import render


def headline(found: Any) -> None:
    """Print the verdict on the worst output; None where nothing was compared."""
    if found is not None:
        render.say(f"Fidelity: {found}", dim=found.silent)


def advice(found: Any) -> list[str]:
    """Return what a run suggests to do differently."""
    if found is None or not found.far:
        return []
    far = f"output {found.output} is far from the original ({found.measure} {found.value})"
    return [f"{far}: more real --data, a smaller --ratio or --selector obs bring it closer"]
