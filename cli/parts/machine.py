"""The processes of a command, and the signal that it has done its imports: see `onnxgrail/__main__.py`."""

from __future__ import annotations

import os

import click


def alone() -> None:
    """Check that the command is not one of several processes, each of which would do the whole work.

    Raises:
        click.UsageError: it is.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise click.UsageError(
            f"{click.get_current_context().info_name} runs in one process; start it without torchrun"
        )


def ready(*names: str) -> None:
    """Import the modules of public names of the library; after that, interrupts are raised where they occur."""
    import onnxgrail

    for name in names:
        getattr(onnxgrail, name)
    steps = click.get_current_context().obj or {}
    if "ready" in steps:
        steps["ready"]()
