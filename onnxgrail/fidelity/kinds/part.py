"""The content of an output, and what the rules that detect it look at."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnxgrail.core import Array, Floats
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.sums import flat

Form = Literal["values", "probabilities", "logits", "binary"]

DETECTED = "of detections"  # why numbers are scores
PEAKS = "a heat map: mostly near 0, up to about 1"  # why numbers are scores; sizes beside it count at its peaks
ACTIVE = 0.1  # scores below it in both models are ignored
SLACK = 1e-3  # tolerance of a sum of probabilities
LOUD = 10.0  # spread of a row of many numbers from which on they are no logits: all of them would be decided
BOX = 4  # columns of a box
LAYOUTS = ((2, 3, 4, 5, 1, 0), (3, 4, 5, 6, 2, 1, 0), (1, 2, 3, 4, 6, 5, 0))
"""Orders of columns with the box, the score and the class first: of PaddleDetection, SSD and YOLOv7."""
OFTEN = 0.5  # most of something
DECIDED = 0.1  # a score this near to 0 or 1 is decided
SEEN = 8  # least samples whose mean tells a common pattern
EQUAL = 1e-11  # most variance between samples, as a share of the energy, of values that do not differ
ALIKE = 0.001  # least standard deviation of a column, as a share of the largest one
UNLIKE = 10.0  # times the spread of another channel from which on channels have units of their own
COMMON = 0.77  # share of the mean in the energy from which on the loss about the mean is the higher one, by its scale
ALONE = 0.6  # variance of the mean of columns, as a share of that of columns that vary on their own
SURELY = 8  # up to this many such columns are no class scores; those of many classes may be so, too
MANY, LEAST = 4096, 0.1  # most numbers of a row with units, and the share of them that may have a far smaller spread
FEW = 16  # up to this many columns are class scores even if no class stands out, unless their softmax is flat
BOXES = re.compile(
    r"(?<![a-z])(b?box|bboxes|loc(?!k)|kps|kpt|keypoint|landmark|lmk|point|coord|offset|regress|reg(?![a-z])|anchor|pose"
    r"|joint|vert|depth|flow|disp|wav|audio|mel|pcm|dist|angle|pitch|freq|durat|forecast)"
)
FEATURES = re.compile(r"embed|pool|hidden|feat|vector|(?<![a-z])emb(?![a-z])|descriptor")
ACTIONS = re.compile(r"(?<![a-z])actions?(?![a-z])|torque|throttle|steer")
DECISIVE = re.compile(r"logit|(?<![a-z])(score|prob|class|conf)|classif")  # names of scores, whatever else they say
SCORES = re.compile(r"logit|(?<![a-z])(score|prob|cls|class|conf|obj|label|heat|mask|seg|sigmoid|softmax)|classif")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The content of an output, or of some of its columns.

    Attributes:
        kind: classes (one row of scores per sample), scores (in 0..1, of many positions), tokens (one row of scores
            per token), sequences (symbols that a loop writes), text (letters and blanks, one row of scores per step of
            a line), labels (values that are equal or not), embedding, values (maps, boxes, waves, points) or state
            (values that are fed back).
        why: the reason for the kind.
        form: conversion to probabilities: none (`probabilities`), softmax (`logits`) or sigmoid (`binary`).
        axis: of the classes or columns, counted with the samples as axis 0.
        columns: indices along `axis` that belong to the part, None for all.
        gate: place among the columns of the score with which a decoder multiplies the others (objectness).
        rows: True if the entries along `axis` are one distribution.
        dominant: the class of most positions, which is ignored.
        least: score from which on a position counts.
        center: the mean over samples, where it is most of the energy; differences from it are measured.
        units: of the columns, if each has its own: differences are divided by them.
        changes: differences from an input are measured, which is most of the energy.
        relative: differences from the mean of the row are measured, which is most of the variance.
        otherwise: the content of the whole output if later samples are no probabilities.
    """

    kind: str
    why: str
    form: Form = "values"
    axis: int | None = None
    columns: tuple[int, ...] | None = None
    gate: int | None = None
    rows: bool = False
    dominant: int | None = None
    least: float = ACTIVE
    center: Floats | None = None
    units: Floats | None = None
    changes: bool = False
    relative: bool = False
    otherwise: Part | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Look:
    """The input of the rules: the name in lower case, values on some samples, and clues about the inputs.

    `masked` tells that some values are what stands for minus infinity, as for actions that are not allowed.
    """

    words: str
    array: Floats
    clues: Clues
    masked: bool = False

    @property
    def telling(self) -> bool:
        """Return True if the samples are real, and enough to show what they have in common."""
        return len(self.array) >= SEEN and not self.clues.synthetic

    @property
    def named(self) -> bool:
        """Return True if the output is named as scores, or masked as these are."""
        return self.masked or bool(SCORES.search(self.words))

    @property
    def rows(self) -> Floats:
        """Return one row of numbers per sample."""
        return flat(self.array)


Rule = Callable[[Look], tuple[Part, ...]]


def probabilities(values: Floats, form: Form) -> Floats:
    """Convert numbers to probabilities; distributions lie along the last axis."""
    if form == "logits":
        shifted = np.exp(values - values.max(axis=-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))
    if form == "binary":
        return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))
    return values


def things(rows: Array) -> tuple[int, ...]:
    """Return the columns of detections (n, columns): two corners, score, class and others; empty if they are none.

    The score is in 0..1, the class a whole number, and no second corner lies before the first one.
    """
    if rows.ndim != 2 or not len(rows) or rows.dtype.kind != "f":
        return ()
    count = rows.shape[1]
    plain = tuple(range(count))
    for order in (*(one for one in LAYOUTS if len(one) == count), *([plain] if count >= BOX + 2 else [])):
        corners, classes = rows[:, order[:BOX]], rows[:, order[BOX + 1]]
        ordered = (corners[:, :2] <= corners[:, 2:]).all()
        if ordered and in_unit(rows[:, order[BOX]]) and (classes == np.round(classes)).all():
            return order
    return ()


def in_unit(array: Floats) -> bool:
    """Return True if all numbers are in 0..1, and not all are 0."""
    return bool(array.min() >= 0 and 0 < array.max() <= 1 + 1e-6)


def centered(look: Look, least: float = -np.inf) -> Floats | None:
    """Return the mean over the samples; None if they are few or random, or hardly differ from it.

    Args:
        look: the values.
        least: share of the mean in the energy from which on it is returned.
    """
    energy = np.square(look.array).mean(axis=0).sum()
    share = 1 - look.array.var(axis=0).sum() / energy if energy > 0 else 1.0
    return look.array.mean(axis=0) if look.telling and least < share < 1 - EQUAL else None


def values(look: Look, why: str) -> Part:
    """Return a part with values; differences from their mean over the samples count if that is most of the energy.

    Points of a face are an example: the mean is near all of them, and only the rest tells samples apart.  Channels of
    other units, such as a pressure beside velocities, count by their own spread.
    """
    units = units_of(look)
    return Part(kind="values", why=why, center=centered(look, COMMON if units is None else -np.inf), units=units)


def units_of(look: Look) -> Floats | None:
    """Return the spread of each number of a row, or of each channel, if their units differ; None if they do not."""
    spread = look.array.std(axis=0)
    if not look.telling or spread.size <= FEW:
        return None
    found, most = None, UNLIKE
    for axis in range(spread.ndim):
        others = tuple(a for a in range(spread.ndim) if a != axis)
        channels = np.sqrt(np.square(spread).mean(axis=others, keepdims=True))
        if not 1 < channels.size <= (FEW if others else MANY):
            continue
        low, high = np.quantile(channels, (0, 1) if others else (LEAST, 1 - LEAST))
        times = high / max(low, ALIKE * high) if high > 0 else 0.0
        if times > most:
            found, most = np.broadcast_to(np.maximum(channels, ALIKE * channels.max()), spread.shape), times
    return None if found is None else np.array(found)


def vary_alone(look: Look, columns: Floats) -> bool:
    """Return True if a few columns (rows, columns) vary on their own, as measured numbers do.

    Of class scores, some fall where others rise: a softmax does not see what they have in common, so it is not learned.
    """
    if not look.telling or not 1 < columns.shape[1] <= FEW:
        return False
    rest = columns - columns.mean(axis=0)
    return bool(columns.shape[1] * rest.mean(axis=1).var() > ALONE * rest.var(axis=0).mean())


def between(array: Floats) -> bool:
    """Return True if most numbers are neither near 0 nor near 1, as scores would be."""
    return bool(np.mean((array > DECIDED) & (array < 1 - DECIDED)) > OFTEN)
