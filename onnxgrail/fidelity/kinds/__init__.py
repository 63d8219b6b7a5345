"""Detects the content of an output from its values, shape and name, to choose the measure for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.core import Array, Bools, Floats
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.kinds.part import BOX, BOXES, DECISIVE, DETECTED, FEW, Form, Look, Part, in_unit, things, values
from onnxgrail.fidelity.kinds.positions import POSITIONS, classes, distribution, tokens
from onnxgrail.fidelity.kinds.read import with_least
from onnxgrail.fidelity.kinds.rows import ROW, differing, with_numbers, with_relative
from onnxgrail.fidelity.lists import LISTED, WRITTEN, written

TOLD = "as --contents says"
OTHER = "other values or shapes in later samples"
LEVELS = 2  # most bytes of a whole number that can be a level of an image or a wave
MASKED = 1e3  # least size of what stands for minus infinity
POINTS = 1024  # most points of one thing, such as a face or a hand; more are anchors of a detector


def parts_of(name: str, arrays: Sequence[Array], clues: Clues) -> tuple[Part, ...]:
    """Detect the content of an output from its values on some samples.

    Args:
        name: of the output.
        arrays: its values, one array per batch, samples first.
        clues: known facts about the model's inputs.
    """
    first, content = arrays[0], clues.contents.get(name)
    whole = first.dtype.kind in "biu" and content is None
    if whole and (first.dtype.itemsize > LEVELS or len(np.unique(first)) <= FEW):
        return (Part(kind="labels", why="whole numbers"),)
    if content is None and (known := _clear(name, arrays, clues)) is not None:
        return _things(known, arrays)
    alike = [array for array in arrays if array.shape[1:] == arrays[0].shape[1:]]
    array = np.concatenate(alike).astype(np.float64)
    finite = np.isfinite(array)
    if not finite.any():
        return (Part(kind="values", why="no values"),)
    array = np.where(finite, array, array.min(where=finite, initial=np.inf))
    shown = _shown(array)
    look = Look(
        words=name.lower(), array=np.where(shown, array, array[shown].min()), clues=clues, masked=not shown.all()
    )
    if whole:
        return (_numbers(look, f"levels of {8 * first.dtype.itemsize} bits"),)
    otherwise = _numbers(look, OTHER)
    parts = _found(look) if content is None else (_told(look, content),)
    found = [with_least(part, array) for part in parts]
    return tuple(replace(part, otherwise=otherwise) if part.form == "probabilities" else part for part in found)


def _shown(array: Floats) -> Bools:
    """Return the mask of values that do not stand for minus infinity, as scores of actions that are not allowed do."""
    shown = array > array.min() / 2
    far = array.min() < -MASKED and shown.any() and array.min(where=shown, initial=np.inf) > array.min() / 10
    return np.asarray(shown) if far else np.ones(array.shape, bool)


def _things(known: Part, arrays: Sequence[Array]) -> tuple[Part, ...]:
    """Return the parts of a list of detections, which has a row for each; else what is known of the output."""
    rows = [array.reshape(-1, array.shape[-1]) for array in arrays if array.ndim == 3 and array.any()]
    alike = len({some.shape[1] for some in rows}) == 1 and all(array.ndim == 3 for array in arrays)
    order = things(np.concatenate(rows)) if alike and known.why == LISTED else ()
    if not order:
        return (known,)
    others = tuple(sorted({*order} - {order[BOX]}))
    scores = Part(kind="scores", why=DETECTED, form="probabilities", columns=(order[BOX],), axis=2)
    return scores, Part(kind="values", why="the other columns", columns=others, axis=2)


def _clear(name: str, arrays: Sequence[Array], clues: Clues) -> Part | None:
    """Return what the clues tell of an output, None if they tell nothing."""
    if name in clues.detected:
        return Part(kind="scores", why=DETECTED, form="probabilities")
    if name in clues.lists:
        if written(arrays):
            return Part(kind="sequences", why=WRITTEN)
        beside = bool(clues.detected & clues.lists) and all(array.ndim == 3 for array in arrays)  # of scores, in rows
        return Part(kind="values", why=LISTED, axis=2 if beside else None)
    if name in clues.changes:
        units, shape = clues.changes[name], arrays[0].shape[1:]
        units = units.reshape(shape) if units is not None and units.size == math.prod(shape) else None
        return Part(kind="values", why="much like an input", changes=True, units=units)
    return Part(kind="state", why="fed back as an input") if clues.is_state(name, arrays[0].shape) else None


def _found(look: Look) -> tuple[Part, ...]:
    """Return what the first rule finds that finds anything."""
    row = _is_row(look.array.shape)
    for rule in (tokens, distribution, _places, *(ROW if row else POSITIONS)):
        parts = rule(look)
        if parts:
            return with_relative(look, with_numbers(look, parts)) if row else parts
    return (_numbers(look, "numbers of many positions"),)


def _told(look: Look, content: str) -> Part:
    """Return the content of an output as the user says it, one of `CONTENTS`."""
    if content == "nothing":
        return Part(kind="state", why=TOLD)
    if content == "values":
        return _numbers(look, TOLD)
    if content == "embedding":
        return Part(kind="embedding", why=TOLD, axis=2 if look.array.ndim == 3 else None)
    form: Form = "probabilities" if in_unit(look.array) else "binary"
    if content == "scores":
        return Part(kind="scores", why=TOLD, form=form)
    return classes(look, TOLD) or Part(kind="classes" if _is_row(look.array.shape) else "scores", why=TOLD, form=form)


def _is_row(shape: tuple[int, ...]) -> bool:
    """Return True if a sample is one row of numbers, or one number."""
    wide = sum(size > 1 for size in shape[1:])
    return wide == 0 or (wide == 1 and len(shape) != 3)  # (N, positions, 1) is a list of positions


def _has_places(shape: tuple[int, ...]) -> bool:
    """Return True if an entry has a meaning of its own that is the same in all samples, so that it has a mean.

    Those of rows, maps, points and series (up to 16 numbers each, in either order of the axes) have one. In lists of
    detections, words or features the same entry may be anything.
    """
    wide = sorted(size for size in shape[1:] if size > 1)
    return len(wide) < 2 or len(shape) > 3 or (len(wide) == 2 and wide[0] <= FEW and wide[1] <= POINTS)


def _places(look: Look) -> tuple[Part, ...]:
    """Detect places, sizes and waves by name."""
    named = BOXES.search(look.words) and not DECISIVE.search(look.words)
    return (_numbers(look, "named as places or sizes"),) if named else ()


def _numbers(look: Look, why: str) -> Part:
    """Return a part with values of many positions, or with places or sizes."""
    if look.rows.shape[1] <= FEW:
        return differing(look, why)
    return values(look, why) if _has_places(look.array.shape) else Part(kind="values", why=why)
