"""What commands ask of the process that they run in, where it is the program's own: see `onnxgrail/start.py`."""

from __future__ import annotations

import click


def tune() -> None:
    """Set what a process may that only compresses, before numpy is imported."""
    _ask("tune")


def ready(*names: str) -> None:
    """Import what is behind public names of the library; from here on an interrupt is raised where it comes."""
    import onnxgrail

    for name in names:
        getattr(onnxgrail, name)
    _ask("ready")


def _ask(what: str) -> None:
    steps = click.get_current_context().obj or {}
    if what in steps:
        steps[what]()
