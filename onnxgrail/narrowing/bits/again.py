"""Round new numbers of a quantized weight with errors carried on, in the form in which it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from onnxgrail.algebra.moments.regression import Moments, error
from onnxgrail.algebra.rounding.carried import carried_to, squared_error
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Floats
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.stored.integers import Levels
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.narrowing.layers import Task, filled, matrix_of

ROUNDED = "its quantized weight loses more by rounding than the fit gains"


def again(
    prepared: Prepared, task: Task, folds: Sequence[Moments], ledger: Ledger, before: Ledger, start: Array
) -> tuple[Ledger, str]:
    """Return the ledger with new numbers of a quantized weight as the file will hold them.

    The layers downstream are then fitted to what they will read. Scales grow for the largest number, and may grow less
    once that is rounded, so both ways are judged as they are stored: with errors carried on, and to nearest. The old
    numbers, which are stored with smaller scales, stay if the rows that judge a fit are closer to them.

    Args:
        prepared: the model.
        task: the layer that reads the weight.
        folds: moments of its kept inputs and its outputs; the last one judges.
        ledger: has the new numbers; it is returned if there are none, or if the weight is float.
        before: the ledger without them.
        start: the old numbers.

    Returns:
        The ledger, and the reason if it is the one without the new numbers, else ''.
    """
    param, node = task.consumer.param, task.consumer.node
    array = ledger.arrays.get(param)
    if array is None or array is start or task.consumer.value not in prepared.survey.facts.stored:
        return ledger, ""
    gram = reduce(Moments.__add__, folds).gram[:-1, :-1].astype(np.float64, copy=False)
    best = _stored(prepared, task, gram, array)
    if param in before.arrays:
        start = filled(task, _stored(prepared, task, gram, start), start)
        before = replace(before, arrays={**before.arrays, param: start})
    shift = ledger.shifts[node][task.made] if node in ledger.shifts else np.zeros(task.outputs)
    old, new = (np.vstack(rows) for rows in ((matrix_of(task, start), 0 * shift), (best, shift)))
    if folds[-1].count and error(folds[-1], old) <= error(folds[-1], new):
        return before, ROUNDED
    return replace(ledger, arrays={**ledger.arrays, param: filled(task, best, array)}), ""


def _stored(prepared: Prepared, task: Task, gram: Floats, array: Array) -> Floats:
    """Return the numbers of a weight at its kept positions as they are stored in the closer of two ways."""
    wanted = matrix_of(task, array)
    ways = wanted, carried_to(wanted, gram, _levels(prepared, task, wanted, array).nearest)
    stored = [_levels(prepared, task, numbers, array).nearest(numbers) for numbers in ways]
    return min(stored, key=lambda numbers: squared_error(numbers - wanted, gram))


def _levels(prepared: Prepared, task: Task, numbers: Floats, now: Array) -> Levels:
    """Return the numbers that a quantized weight can have at its kept positions if it holds these numbers there."""
    whole = filled(task, numbers, np.zeros_like(now))
    levels = weights.levels(task.consumer.value, whole, prepared.model, prepared.survey)
    return Levels(*(matrix_of(task, np.broadcast_to(part, whole.shape)) for part in levels))
