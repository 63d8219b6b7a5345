"""Picks some positions of large maps, such as the pixels of a segmentation, to estimate the loss of a sample."""

from __future__ import annotations

import math

import numpy as np

from onnxgrail.core import Array
from onnxgrail.fidelity.kinds.part import Part

ENOUGH = 2**17  # numbers of a sample that give its loss closely
SIDE = 64  # least positions along an axis of which some are picked
MAP = 4  # least axes of a map; lists of detections have three, with scores and boxes at the same positions


def sparse(part: Part, *arrays: Array) -> tuple[tuple[Array, ...], float]:
    """Return the values at some positions of scores, always the same ones, and the number of positions for each.

    Rows and columns are drawn, because a regular grid would miss what upsampling does between its lines.

    Args:
        part: the content; its axis of classes stays whole.
        *arrays: (n, ...) values of the same shape in several models.
    """
    shape = arrays[0].shape
    size = math.prod(shape[1:])
    axes = [axis for axis in range(1, len(shape)) if axis != part.axis and shape[axis] >= SIDE]
    if part.kind != "scores" or len(shape) < MAP or size <= ENOUGH or not axes:
        return arrays, 1.0
    kept = (ENOUGH / size) ** (1 / len(axes))
    draw = np.random.default_rng(0)
    for axis in axes:
        count = max(SIDE // 2, math.ceil(kept * shape[axis]))
        places = np.sort(draw.choice(shape[axis], count, replace=False))
        arrays = tuple(array.take(places, axis) for array in arrays)
    return arrays, size / math.prod(arrays[0].shape[1:])
