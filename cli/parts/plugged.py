"""Option types that accept plug-ins of other packages, which are searched only for names that are not built in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


class Plugged(click.Choice[str]):
    """A choice of built-in names and the names of entry points of a group."""

    def __init__(self, choices: Sequence[str], group: str) -> None:
        super().__init__(choices)
        self.group = group

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name if it is built in or a plug-in has it."""
        if value not in self.choices:
            from importlib import metadata  # slow compared with --help

            others = metadata.entry_points(group=self.group).names - set(self.choices)
            return click.Choice([*self.choices, *sorted(others)]).convert(value, param, ctx)
        return super().convert(value, param, ctx)
