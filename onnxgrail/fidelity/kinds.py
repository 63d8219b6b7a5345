"""Detects the content of an output from its values, shape and name, to choose the measure for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnxgrail.core import Array, Floats
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.lists import LISTED, WRITTEN, written
from onnxgrail.fidelity.sums import flat

Form = Literal["values", "probabilities", "logits", "binary"]

SLACK = 1e-3  # tolerance of a sum of probabilities
VECTOR = 64  # more numbers per token than this are a vector
VOCABULARY = 1000  # least columns of scores of a vocabulary
SHARP = 0.2  # least mean of the highest probability for many columns to count as class scores
OUT = 4.0  # standard deviations over the mean of a row: no large number among many such as a vector has
LOUD = 10.0  # spread of a row of many numbers from which on they are no logits: all of them would be decided
FEW = 16  # up to this many columns are class scores even if no class stands out, unless their softmax is flat
FLAT = 0.1  # share of the way from equal probabilities to a certain class below which a softmax is flat
SEEN = 8  # least samples for the test for one common pattern
OFTEN = 0.5  # a class with a larger mean probability is the background
PATTERN = 0.1  # most variance between samples, as a share of the total, for one common pattern
CLEAR = 0.8  # least mean of the highest probability for a map without a telling name to hold classes
QUIET = 0.05  # a column of scores with a smaller median is mostly empty
BOX = 4  # columns of a box
FOUND = 0.3  # least score of something that a detector finds
CLASSES = 256  # most columns of a map of classes
WIDE = 1024  # most columns of a list of detections
SIDE = 8  # least positions per axis of an image
DECIDED = 0.1  # a score this near to 0 or 1 is decided
RARE = 0.3  # largest share of positions of something rare

BOXES = re.compile(
    r"(?<![a-z])(b?box|bboxes|loc(?!k)|kps|kpt|keypoint|landmark|lmk|point|coord|offset|regress|reg(?![a-z])|anchor|pose"
    r"|joint|vert|depth|flow|disp|wav|audio|mel|pcm|dist|angle|pitch|freq|durat)"
)
FEATURES = re.compile(r"embed|pool|hidden|feat|vector|(?<![a-z])emb(?![a-z])|descriptor")
SCORES = re.compile(r"logit|(?<![a-z])(score|prob|cls|class|conf|obj|label|heat|mask|seg|sigmoid|softmax|pred)|classif")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The content of an output, or of some of its columns.

    Attributes:
        kind: classes (one row of scores per sample), scores (in 0..1, of many positions), tokens (one row of scores
            per token), sequences (symbols that a loop writes), labels (values that are equal or not), embedding, values
            (maps, boxes, waves, points) or state (values that are fed back).
        why: the reason for the kind.
        form: conversion to probabilities: none (`probabilities`), softmax (`logits`) or sigmoid (`binary`).
        axis: of the classes or columns, counted with the samples as axis 0.
        columns: indices along `axis` that belong to the part, None for all.
        gate: place among the columns of the score with which a decoder multiplies the others (objectness).
        rows: True if the entries along `axis` are one distribution.
        dominant: the class of most positions, which is ignored.
        center: the common pattern of values that are similar in all samples; differences from it are measured.
    """

    kind: str
    why: str
    form: Form = "values"
    axis: int | None = None
    columns: tuple[int, ...] | None = None
    gate: int | None = None
    rows: bool = False
    dominant: int | None = None
    center: Floats | None = None


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
    look = _Look(words=name.lower(), array=array, clues=clues)
    for rule in (_tokens, _distribution, *(ROW if _is_row(array.shape) else POSITIONS)):
        parts = rule(look)
        if parts:
            return parts
    return (Part(kind="values", why="numbers of many positions"),)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Look:
    """The input of the rules: the name in lower case, values on some samples, and clues about the inputs."""

    words: str
    array: Floats
    clues: Clues

    @property
    def rows(self) -> Floats:
        """Return one row of numbers per sample."""
        return flat(self.array)


Rule = Callable[[_Look], tuple[Part, ...]]


def _is_row(shape: tuple[int, ...]) -> bool:
    """Return True if a sample is one row of numbers, or one number."""
    wide = sum(size > 1 for size in shape[1:])
    return wide == 0 or (wide == 1 and len(shape) != 3)  # (N, positions, 1) is a list of positions


def _tokens(look: _Look) -> tuple[Part, ...]:
    """Detect scores of a vocabulary, one row per token."""
    array, ids = look.array, look.clues.ids
    if array.ndim != 3 or ids is None or "logit" not in look.words or array.shape[1] != ids[1]:
        return ()
    if not look.clues.predicts and array.shape[2] < VOCABULARY:
        return ()
    why = "predicts the tokens of its input" if look.clues.predicts else "one row of scores per token"
    return (Part(kind="tokens", why=why, form="logits", axis=2, rows=True),)


def _distribution(look: _Look) -> tuple[Part, ...]:
    """Detect rows that sum to 1 along the last axis or the second one."""
    array = look.array
    if array.ndim < 2 or array.min() < 0:
        return ()
    for axis in dict.fromkeys((array.ndim - 1, 1)):
        if array.shape[axis] < 2 or not np.allclose(array.sum(axis), 1.0, atol=SLACK):
            continue
        if array.shape[axis] == math.prod(array.shape[1:]):
            return (Part(kind="classes", why="rows sum to 1", form="probabilities", axis=axis, rows=True),)
        return (_dense(array, axis, "rows sum to 1", "probabilities"),)
    return ()


def _dense(array: Floats, axis: int, why: str, form: Form) -> Part:
    """Return a part with a distribution at each of many positions; the class of most positions is ignored."""
    means = probabilities(np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]), form).mean(axis=0)
    dominant = int(means.argmax()) if means.max() > OFTEN else None
    return Part(kind="scores", why=why, form=form, axis=axis, rows=True, dominant=dominant)


def probabilities(values: Floats, form: Form) -> Floats:
    """Convert numbers to probabilities; distributions lie along the last axis."""
    if form == "logits":
        shifted = np.exp(values - values.max(axis=-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
    if form == "binary":
        return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))
    return values


def _places(look: _Look) -> tuple[Part, ...]:
    return (Part(kind="values", why="named as places or sizes"),) if BOXES.search(look.words) else ()


# ---------------------------------------------------------------------------------------- one row of numbers per sample


def _row_in_range(look: _Look) -> tuple[Part, ...]:
    if not _unit(look.array):
        return ()
    kind = "classes" if look.rows.shape[1] == 1 else "scores"
    return (Part(kind=kind, why="in 0..1", form="probabilities"),)


def _one_number(look: _Look) -> tuple[Part, ...]:
    if look.rows.shape[1] > 1:
        return ()
    if SCORES.search(look.words):
        return (Part(kind="classes", why="named as a score", form="binary"),)
    return (Part(kind="values", why="one number"),)


def _features(look: _Look) -> tuple[Part, ...]:
    if FEATURES.search(look.words) and look.rows.shape[1] > 1:
        return (Part(kind="embedding", why="named as features"),)
    lengths = np.linalg.norm(look.rows, axis=1)
    if look.rows.shape[1] > BOX and np.allclose(lengths, 1.0, atol=SLACK):
        return (Part(kind="embedding", why="rows of length 1"),)
    return ()


def _pattern(look: _Look) -> tuple[Part, ...]:
    """Detect rows that hardly differ from their mean, such as points of a face; class scores differ."""
    rows = look.rows
    if len(rows) < SEEN or look.clues.synthetic or SCORES.search(look.words):
        return ()
    inside = np.square(rows - rows.mean(axis=0)).sum()
    if len(np.unique(rows.argmax(axis=1))) > 1 and inside >= PATTERN * np.square(rows - rows.mean()).sum():
        return ()
    return (Part(kind="values", why="the same pattern in all samples", center=look.array.mean(axis=0)),)


def _class_row(look: _Look) -> tuple[Part, ...]:
    named, columns = bool(SCORES.search(look.words)), look.rows.shape[1]
    few, equal = columns <= FEW, 1 / columns
    least = equal + FLAT * (1 - equal) if few else SHARP
    loud = not few and np.median(look.rows.std(axis=1)) > LOUD
    if named or (not loud and probabilities(look.rows, "logits").max(axis=1).mean() >= least):
        why = "named as scores" if named else "one row of scores"
        return (Part(kind="classes", why=why, form="logits", axis=1, rows=True),)
    if few:
        return (Part(kind="values", why="a few numbers, and no class stands out"),)
    return (Part(kind="embedding", why="one row of many numbers, no class stands out"),)


# --------------------------------------------------------------------------------- numbers of many positions per sample


def _vectors(look: _Look) -> tuple[Part, ...]:
    """Detect one vector per token."""
    array, ids = look.array, look.clues.ids
    if array.ndim != 3 or "logit" in look.words:
        return ()
    tokens = (ids is not None and array.shape[1] == ids[1] and array.shape[2] > VECTOR) or FEATURES.search(look.words)
    return (Part(kind="embedding", why="one vector per token", axis=2),) if tokens else ()


def _unit(array: Floats) -> bool:
    return bool(array.min() >= 0 and 0 < array.max() <= 1 + 1e-6)


def _in_range(look: _Look) -> tuple[Part, ...]:
    """Detect numbers in 0..1: scores, an image, or boxes in relative coordinates beside scores."""
    array = look.array
    if not _unit(array):
        return ()
    scores = Part(kind="scores", why="in 0..1", form="probabilities")
    if SCORES.search(look.words):
        return (scores,)
    undecided = np.mean((array > DECIDED) & (array < 1 - DECIDED)) > OFTEN
    if sum(size >= SIDE for size in array.shape[1:]) >= 2 and undecided:
        return (Part(kind="values", why="an image: in 0..1, mostly in between"),)
    axis = _columns(array) if array.ndim == 3 else None
    if axis is not None and BOX < array.shape[axis] <= WIDE:
        columns = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        boxes = np.median(columns[:, :BOX], axis=0)
        if ((boxes > QUIET) & (boxes < 1 - QUIET)).all() and np.median(columns[:, BOX:]) < QUIET:
            return _split(columns, axis, range(BOX), range(BOX, array.shape[axis]))
    return (scores,)


def _mixed(look: _Look) -> tuple[Part, ...]:
    """Detect a list of detections: columns in 0..1 beside others, such as four of a box and one per class."""
    array = look.array
    if array.ndim != 3:
        return ()
    for axis in sorted((1, 2), key=lambda axis: array.shape[axis]):
        count = array.shape[axis]
        if not BOX < count <= WIDE or array.shape[3 - axis] <= BOX:
            continue
        columns = np.moveaxis(array, axis, -1).reshape(-1, count)
        scores = (columns.min(axis=0) >= 0) & (columns.max(axis=0) <= 1) & (columns.max(axis=0) > 0)
        if scores[BOX] and not scores[:BOX].all():
            return _split(columns, axis, np.flatnonzero(~scores).tolist(), np.flatnonzero(scores).tolist())
    return ()


def _split(columns: Floats, axis: int, values: Sequence[int], scores: Sequence[int]) -> tuple[Part, ...]:
    gate = 0 if _gates(columns[:, scores]) else None
    return (
        Part(kind="scores", why="columns in 0..1", form="probabilities", columns=tuple(scores), gate=gate, axis=axis),
        Part(kind="values", why="the other columns", columns=tuple(values), axis=axis),
    )


def _gates(scores: Floats) -> bool:
    """Return True if the first column of scores (positions, columns) says if there is anything, as objectness does.

    Where it is high, another column is high, too; of classes only one is.
    """
    high = scores[:, 0] > FOUND
    return bool(scores.shape[1] > 1 and high.any() and np.mean(scores[high, 1:].max(axis=1) > FOUND) > OFTEN)


def _columns(array: Floats) -> int | None:
    """Return the axis that counts classes or columns: the smaller one of the second and the last."""
    if array.ndim < 3:
        return None
    axis = min((array.ndim - 1, 1), key=lambda axis: array.shape[axis])
    return axis if array.shape[axis] <= WIDE else None


def _scores(look: _Look) -> tuple[Part, ...]:
    """Detect raw scores of many positions: by name, or because one class stands out at most positions."""
    array = look.array
    axis = array.ndim - 1 if array.ndim == 3 else _columns(array)
    named = bool(SCORES.search(look.words))
    if not named and (array.ndim == 3 or axis is None or not 1 < array.shape[axis] <= CLASSES):
        return ()
    why = "named as scores" if named else "one class stands out at most positions"
    if axis is None or array.shape[axis] == 1:
        return (Part(kind="scores", why=why, form="binary"),)
    if not named and probabilities(np.moveaxis(array, axis, -1), "logits").max(axis=-1).mean() < CLEAR:
        return ()
    if np.median(array) < -1 and np.mean(array.max(axis=axis) > 0) < OFTEN:
        return (Part(kind="scores", why=f"{why}, and no class at most positions", form="binary"),)
    return (_dense(array, axis, why, "logits"),)


def _lines(look: _Look) -> tuple[Part, ...]:
    """Detect raw scores of letters or words: at most positions one column stands out far, and not always the same."""
    array = look.array
    rows, axes = array.reshape(-1, array.shape[-1]), sum(size > 1 for size in array.shape[1:-1])
    if axes > 1 or array.ndim < 3 or array.min() >= 0 or np.median(rows.std(axis=1)) > LOUD:  # a spectrum, a wave
        return ()
    several = len(np.unique(rows.argmax(axis=1))) > FEW  # vectors may have a few large columns
    far = rows.max(axis=1) - rows.mean(axis=1) > OUT * rows.std(axis=1)
    clear = np.mean(far & (probabilities(rows, "logits").max(axis=1) > OFTEN)) > OFTEN
    return (_dense(array, array.ndim - 1, "one of many columns stands out", "logits"),) if several and clear else ()


def _rare(look: _Look) -> tuple[Part, ...]:
    """Detect logits of something rare: nearly all numbers far below 0, a few above."""
    chances = probabilities(look.array, "binary")
    sure = np.mean((chances < DECIDED) | (chances > 1 - DECIDED))
    if np.median(look.array) < -1 and sure > 1 - DECIDED and 0 < np.mean(look.array > 0) < RARE:
        return (Part(kind="scores", why="mostly far below 0, with some above", form="binary"),)
    return ()


ROW: tuple[Rule, ...] = (_places, _features, _row_in_range, _one_number, _pattern, _class_row)
POSITIONS: tuple[Rule, ...] = (_places, _vectors, _in_range, _mixed, _lines, _scores, _rare)
