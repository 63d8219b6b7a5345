"""The columns that belong to a part of an output, and the scores among them that count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxgrail.core import Array, Floats
from onnxgrail.fidelity.kinds.part import ACTIVE, OFTEN, Part, probabilities

MOST = 0.9  # share of the positions of which hardly any holds something


def columns_of(values: Array, part: Part) -> Floats:
    """Return the columns of a part, in float64; scores of classes are multiplied by their gate, as decoders do."""
    if part.columns is None or part.axis is None:
        values = values.astype(np.float64)
        return about_row(values) if part.relative else values
    first, count = part.columns[0], len(part.columns)
    if part.columns == tuple(range(first, first + count)):  # columns side by side need no copy of their own
        values = values[(slice(None),) * part.axis + (slice(first, first + count),)]
    else:
        values = np.take(values, part.columns, axis=part.axis)
    values = np.moveaxis(values.astype(np.float64), part.axis, -1)
    if part.gate is not None:
        gate = values[..., part.gate].copy()
        values *= gate[..., None]
        values[..., part.gate] = gate
    return np.moveaxis(values, -1, part.axis)


def about_row(values: Floats) -> Floats:
    """Return rows (samples, columns) as differences from their own means."""
    return np.asarray(values - values.mean(axis=1, keepdims=True))


def columns_last(values: Floats, part: Part) -> Floats:
    """Return scores with the axis of the classes or columns last."""
    return values if part.axis is None else np.moveaxis(values, part.axis, -1)


def chances_of(values: Floats, part: Part) -> Floats:
    """Return the probabilities of a part's columns, these last, without the dominant class."""
    chances = probabilities(columns_last(values, part), part.form)
    return chances if part.dominant is None else np.delete(chances, part.dominant, axis=-1)


def with_least(part: Part, array: Array) -> Part:
    """Return scores with the least one that counts: a weak detector is nowhere sure that there is nothing.

    Its scores of empty positions are above 0.1, but near each other.  There are so many that the loss would be that of
    nothing else.

    Args:
        part: the content of the output.
        array: its values on some samples.
    """
    if part.kind != "scores":
        return part
    chances = chances_of(columns_of(array, part), part)
    low, high = np.quantile(chances, (1 - MOST, MOST))
    empty = ACTIVE < high < OFTEN < chances.max() and high - low < ACTIVE
    return replace(part, least=float(high) + ACTIVE) if empty else part
