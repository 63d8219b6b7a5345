"""Choices that packages beside onnxgrail can add to, looked for only when a name is not one of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click


class Plugged(click.Choice[str]):
    """Built-in names, and those of entry points of a group."""

    def __init__(self, choices: Sequence[str], group: str) -> None:
        super().__init__(choices)
        self.group = group

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name, if somebody has it."""
        if value not in self.choices:
            from importlib import metadata  # a tenth of what --help takes

            if metadata.entry_points(group=self.group, name=str(value)):
                return value
        return super().convert(value, param, ctx)
