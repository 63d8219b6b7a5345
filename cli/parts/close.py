"""Print the fidelity of the result: the line on the worst output."""

from __future__ import annotations

from typing import Any

from . import render


def headline(found: Any) -> None:
    """Print the verdict on the worst output, unless nothing was compared (None)."""
    if found is not None:
        render.say(f"Fidelity: {found}", dim=found.silent)
