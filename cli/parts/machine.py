"""Tell the program that a command has imported all that it needs: see `onnxgrail/__main__.py`."""

from __future__ import annotations

import click


def ready(*names: str) -> None:
    """Import the modules of public names of the library; from here on an interrupt is raised where it comes."""
    import onnxgrail

    for name in names:
        getattr(onnxgrail, name)
    steps = click.get_current_context().obj or {}
    if "ready" in steps:
        steps["ready"]()
