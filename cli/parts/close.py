"""Print the fidelity of the result: the line on the worst output, and advice if it is far off."""

from __future__ import annotations

from typing import Any

from . import render


def headline(found: Any) -> None:
    """Print the verdict on the worst output, unless nothing was compared (None)."""
    if found is not None:
        render.say(f"Fidelity: {found}", dim=found.silent)


def advice(found: Any) -> list[str]:
    """Return suggestions for a result that is far from the original."""
    if found is None or not found.far:
        return []
    far = f"output {found.output} is far from the original ({found.measure} {found.value})"
    return [f"{far}: more real --data, a smaller --ratio or --selector obs bring it closer"]
