"""Detects the content of an output from its values, shape and name, to choose the measure for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrail.core import Array
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.kinds.part import BOXES, FEW, Look, Part
from onnxgrail.fidelity.kinds.positions import POSITIONS, distribution, tokens
from onnxgrail.fidelity.kinds.rows import ROW
from onnxgrail.fidelity.lists import LISTED, WRITTEN, written


def parts_of(name: str, arrays: Sequence[Array], clues: Clues) -> tuple[Part, ...]:
    """Detect the content of an output from its values on some samples.

    Args:
        name: of the output.
        arrays: its values, one array per batch, samples first.
        clues: known facts about the model's inputs.
    """
    first = arrays[0]
    if first.dtype.kind in "biu":
        levels = first.dtype.itemsize == 1 and len(np.unique(first)) > FEW
        return (Part(kind="values", why="8-bit levels") if levels else Part(kind="labels", why="whole numbers"),)
    if name in clues.lists:
        kind, why = ("sequences", WRITTEN) if written(arrays) else ("values", LISTED)
        return (Part(kind=kind, why=why),)
    if clues.is_state(name, first.shape):
        return (Part(kind="state", why="fed back as an input"),)
    alike = [array for array in arrays if array.shape[1:] == arrays[0].shape[1:]]
    array = np.concatenate(alike).astype(np.float64)
    finite = np.isfinite(array)
    if not finite.any():
        return (Part(kind="values", why="no values"),)
    array = np.where(finite, array, array.min(where=finite, initial=np.inf))
    look = Look(words=name.lower(), array=array, clues=clues)
    for rule in (tokens, distribution, _places, *(ROW if _is_row(array.shape) else POSITIONS)):
        parts = rule(look)
        if parts:
            return parts
    return (Part(kind="values", why="numbers of many positions"),)


def _is_row(shape: tuple[int, ...]) -> bool:
    """Return True if a sample is one row of numbers, or one number."""
    wide = sum(size > 1 for size in shape[1:])
    return wide == 0 or (wide == 1 and len(shape) != 3)  # (N, positions, 1) is a list of positions


def _places(look: Look) -> tuple[Part, ...]:
    """Detect places, sizes and waves by name."""
    return (Part(kind="values", why="named as places or sizes"),) if BOXES.search(look.words) else ()
