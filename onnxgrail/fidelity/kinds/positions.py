"""Rules for outputs with numbers of many positions per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity.kinds.part import (
    BOX,
    DECIDED,
    FEATURES,
    FEW,
    LOUD,
    OFTEN,
    PEAKS,
    SEEN,
    SLACK,
    SURELY,
    Form,
    Look,
    Part,
    Rule,
    between,
    in_unit,
    probabilities,
    values,
    vary_alone,
)

VECTOR = 64  # more numbers per token than this are a vector
VOCABULARY = 1000  # least columns of scores of a vocabulary
OUT = 4.0  # standard deviations over the mean of a row: no large number among many such as a vector has
CLEAR = 0.8  # least mean of the highest probability for a map without a telling name to hold classes
QUIET = 0.05  # a column of scores with a smaller median is mostly empty
FOUND = 0.3  # least score of something that a detector finds
CLASSES = 256  # most columns of a map of classes
WIDE = 1024  # most columns of a list of detections
SIDE = 8  # least positions per axis of an image
EMPTY = 0.9  # least share of a heat map that is near 0
HEAT = 1.5  # upper bound of a heat map, whose peaks are near 1
RARE = 0.3  # largest share of positions of something rare
LETTERS, STEPS = 11, 512  # least classes of a text, the digits and a blank, and most steps of a line
LEAST, LINE = 2, 48  # letters of a line on average; a longer text is not read as a whole
BLANK, SPIKE = 0.25, 2.0  # least share of blanks, and most steps of a letter on average
BRIGHT = 256.0  # upper bound of levels of an image
RGB, TOGETHER = 3, 0.5  # channels of an image, and their least correlation


def tokens(look: Look) -> tuple[Part, ...]:
    """Detect scores of a vocabulary, one row per token."""
    array, ids = look.array, look.clues.ids
    named = "logit" in look.words or look.words == look.clues.scores
    if array.ndim != 3 or ids is None or not named or array.shape[1] != ids[1]:
        return ()
    if not look.clues.predicts and array.shape[2] < VOCABULARY:
        return ()
    why = "predicts the tokens of its input" if look.clues.predicts else "one row of scores per token"
    return (Part(kind="tokens", why=why, form="logits", axis=2, rows=True),)


def distribution(look: Look) -> tuple[Part, ...]:
    """Detect rows that sum to 1 along the last axis or the second one, or whose exponentials do."""
    array = look.array
    logs = array.max() <= SLACK and array.min() < 0
    if array.ndim < 2 or (array.min() < 0 and not logs):
        return ()
    form: Form = "logits" if logs else "probabilities"
    why = "logarithms of rows that sum to 1" if logs else "rows sum to 1"
    for axis in dict.fromkeys((array.ndim - 1, 1)):
        sums = (np.exp(array) if logs else array).sum(axis)
        if array.shape[axis] < 2 or not np.allclose(sums, 1.0, atol=SLACK):
            continue
        if array.shape[axis] == math.prod(array.shape[1:]):
            return (Part(kind="classes", why=why, form=form, axis=axis, rows=True),)
        return (_dense(look, axis, why, form),)
    return ()


def classes(look: Look, why: str) -> Part | None:
    """Return the part of an output with scores of classes, one row of them or many; None if there is one class."""
    if found := distribution(look):
        return found[0]
    array, columns = look.array, look.rows.shape[1]
    if columns == 1:
        return None
    if columns in array.shape[1:]:
        return Part(kind="classes", why=why, form="logits", axis=1, rows=True)
    axis = _classes(array)
    return None if axis is None or array.shape[axis] == 1 else _dense(look, axis, why, "logits")


def _dense(look: Look, axis: int, why: str, form: Form) -> Part:
    """Return a part with a distribution at each of many positions, which ignores a dominant class, or lines of text."""
    chances = probabilities(np.moveaxis(look.array, axis, -1), form)
    other = look.clues.ids is not None or not look.clues.common.isdisjoint(chances.shape[1:-1])  # of words or boxes
    blank = None if other else _blank(chances)
    if blank is not None:
        return Part(kind="text", why=f"{why}, letters and blanks", form=form, axis=axis, rows=True, dominant=blank)
    means = chances.reshape(-1, chances.shape[-1]).mean(axis=0)
    dominant = int(means.argmax()) if means.max() > OFTEN else None
    return Part(kind="scores", why=why, form=form, axis=axis, rows=True, dominant=dominant)


def _blank(chances: Floats) -> int | None:
    """Return the class of a blank if rows of classes (samples, ..., classes) are lines of text, as for CTC, else None.

    Letters are single steps among blanks; what is found in pictures and sounds lasts longer, or has fewer classes.
    """
    count, *steps, classes = chances.shape
    if classes < LETTERS or sum(size > 1 for size in steps) != 1 or max(steps) > STEPS:
        return None
    labels = chances.argmax(axis=-1).reshape(count, -1)
    counts = np.bincount(labels.ravel(), minlength=classes)
    letters = labels != (blank := int(counts.argmax()))
    begins = letters & (np.diff(labels, axis=1, prepend=-1) != 0)
    each = begins.sum() / count
    spikes = LEAST <= each <= LINE and letters.sum() <= SPIKE * begins.sum()
    return blank if spikes and counts[blank] > BLANK * labels.size else None


def _vectors(look: Look) -> tuple[Part, ...]:
    """Detect one vector per token."""
    array, ids = look.array, look.clues.ids
    if array.ndim != 3 or "logit" in look.words:
        return ()
    one_each = (ids is not None and array.shape[1] == ids[1] and array.shape[2] > VECTOR) or FEATURES.search(look.words)
    return (Part(kind="embedding", why="one vector per token", axis=2),) if one_each else ()


def _heat(look: Look) -> tuple[Part, ...]:
    """Detect heat maps: mostly near 0, and near 1 where something is; those of a linear layer leave 0..1 a little."""
    array = look.array
    if array.ndim < 4 or array.min() < -FOUND or not FOUND < array.max() < HEAT:
        return ()
    empty = np.mean(np.abs(array) < DECIDED) > EMPTY
    return (Part(kind="scores", why=PEAKS),) if empty else ()


def _in_range(look: Look) -> tuple[Part, ...]:
    """Detect numbers in 0..1: scores, an image, or boxes in relative coordinates beside scores."""
    array = look.array
    if not in_unit(array):
        return ()
    scores = Part(kind="scores", why="in 0..1", form="probabilities")
    if look.named:
        return (scores,)
    if sum(size >= SIDE for size in array.shape[1:]) >= 2 and between(array):
        return (values(look, "an image: in 0..1, mostly in between"),)
    axis = _columns(array) if array.ndim == 3 else None
    if axis is not None and BOX < array.shape[axis] <= WIDE:
        columns = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        boxes = np.median(columns[:, :BOX], axis=0)
        if ((boxes > QUIET) & (boxes < 1 - QUIET)).all() and np.median(columns[:, BOX:]) < QUIET:
            return _split(columns, axis, range(BOX), range(BOX, array.shape[axis]))
    return (scores,)


def _mixed(look: Look) -> tuple[Part, ...]:
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


def _classes(array: Floats) -> int | None:
    """Return the axis that counts classes: the second or the last one, along which the softmax is surer.

    Either may be the longer one: a line of text has fewer steps than letters, a map of 150 classes 128 rows.
    """
    if array.ndim < 3 or 1 in (array.shape[1], array.shape[-1]):
        return 2 if array.ndim == 3 else _columns(array)
    return max((array.ndim - 1, 1), key=lambda axis: _sure(np.moveaxis(array[:SEEN], axis, -1)))


def _sure(logits: Floats) -> float:
    """Return the mean share of the uncertainty about the class that the softmax of a row of logits removes."""
    chances = probabilities(logits, "logits")
    entropy = -(chances * np.log(np.maximum(chances, np.finfo(np.float64).tiny))).sum(axis=-1)
    return 1 - float(entropy.mean()) / math.log(logits.shape[-1])


def _scores(look: Look) -> tuple[Part, ...]:
    """Detect raw scores of many positions: by name, or because one class stands out at most positions."""
    array = look.array
    named = look.named
    axis = _classes(array) if named else _columns(array)
    if not named and (array.ndim == 3 or axis is None or not 1 < array.shape[axis] <= CLASSES or _colors(array, axis)):
        return ()
    why = "named as scores" if named else "one class stands out at most positions"
    if axis is None or array.shape[axis] == 1:
        return (Part(kind="scores", why=why, form="binary"),)
    if not named and probabilities(np.moveaxis(array, axis, -1), "logits").max(axis=-1).mean() < CLEAR:
        return ()
    if np.median(array) < -1 and np.mean(array.max(axis=axis) > 0) < OFTEN:
        return (Part(kind="scores", why=f"{why}, and no class at most positions", form="binary"),)
    scores = _dense(look, axis, why, "logits")
    columns = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    if named or not vary_alone(look, columns):
        return (scores,)
    numbers = values(look, "numbers that vary on their own")
    return (numbers,) if columns.shape[1] <= SURELY else (numbers, scores)


def _colors(array: Floats, axis: int) -> bool:
    """Return True for red, green and blue in 0..255: they rise and fall together, where raw scores of classes part."""
    rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    if rows.shape[1] != RGB or rows.std(axis=0).min() < LOUD:
        return False
    if rows.min() >= -1 and rows.max() <= BRIGHT:  # no raw score is limited so
        return True
    return bool(np.corrcoef(rows, rowvar=False).min() > TOGETHER)


def _lines(look: Look) -> tuple[Part, ...]:
    """Detect raw scores of letters or words: at most positions one column stands out far, and not always the same."""
    array = look.array
    if array.ndim < 3 or array.min() >= 0:
        return ()
    for axis in dict.fromkeys((array.ndim - 1, 1)):
        wide = sum(size > 1 for place, size in enumerate(array.shape) if place not in (0, axis))
        rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        spread = rows.std(axis=1)
        if wide > 1 or np.median(spread) > LOUD:  # a spectrum, a wave
            continue
        several = len(np.unique(rows.argmax(axis=1))) > FEW  # vectors may have a few large columns
        far = rows.max(axis=1) - rows.mean(axis=1) > OUT * spread
        if several and np.mean(far & (probabilities(rows, "logits").max(axis=1) > OFTEN)) > OFTEN:
            return (_dense(look, axis, "one of many columns stands out", "logits"),)
    return ()


def _rare(look: Look) -> tuple[Part, ...]:
    """Detect logits of something rare: nearly all numbers far below 0, a few above."""
    chances = probabilities(look.array, "binary")
    sure = np.mean((chances < DECIDED) | (chances > 1 - DECIDED))
    if np.median(look.array) < -1 and sure > 1 - DECIDED and 0 < np.mean(look.array > 0) < RARE:
        return (Part(kind="scores", why="mostly far below 0, with some above", form="binary"),)
    return ()


POSITIONS: tuple[Rule, ...] = (_vectors, _heat, _in_range, _mixed, _lines, _scores, _rare)
