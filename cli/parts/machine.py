"""Signal that a command has done its imports: see `onnxgrail/__main__.py`."""

from __future__ import annotations

import click


def ready(*names: str) -> None:
    """Import the modules of public names of the library; after that, interrupts are raised where they occur."""
    import onnxgrail

    for name in names:
        getattr(onnxgrail, name)
    steps = click.get_current_context().obj or {}
    if "ready" in steps:
        steps["ready"]()
