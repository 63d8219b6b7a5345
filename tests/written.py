"""The files that a command has written."""

from __future__ import annotations

from pathlib import Path


def weights_of(model: Path) -> Path:
    """The file with the weights of a written model, which is called after the model and its own content."""
    (file,) = model.parent.glob(f"{model.name}.????????????????.data")
    return file
