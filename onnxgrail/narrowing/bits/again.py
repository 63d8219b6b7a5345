"""Round new numbers of a quantized weight with errors carried on, in the form in which it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from onnxgrail.algebra.moments.regression import Moments
from onnxgrail.algebra.rounding.carried import carried_to, squared_error
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Floats
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.stored.integers import Levels
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.narrowing.layers import Task, filled, matrix_of


def again(prepared: Prepared, task: Task, folds: Sequence[Moments], ledger: Ledger) -> Ledger:
    """Return the ledger with new numbers of a quantized weight as the file will hold them.

    The layers downstream are then fitted to what they will read. Scales grow for the largest number, and may grow less
    once that is rounded, so both ways are judged as they are stored: with errors carried on, and to nearest.

    Args:
        prepared: the model.
        task: the layer that reads the weight.
        folds: second moments of its kept inputs.
        ledger: has the new numbers; it is returned if there are none, or if the weight is float.
    """
    array = ledger.arrays.get(task.consumer.param)
    if array is None or task.consumer.value not in prepared.survey.facts.stored:
        return ledger
    wanted = matrix_of(task, array)
    gram = reduce(Moments.__add__, folds).gram[:-1, :-1].astype(np.float64, copy=False)
    ways = wanted, carried_to(wanted, gram, _levels(prepared, task, wanted, array).nearest)
    stored = [_levels(prepared, task, numbers, array).nearest(numbers) for numbers in ways]
    best = min(stored, key=lambda numbers: squared_error(numbers - wanted, gram))
    return replace(ledger, arrays={**ledger.arrays, task.consumer.param: filled(task, best, array)})


def _levels(prepared: Prepared, task: Task, numbers: Floats, now: Array) -> Levels:
    """Return the numbers that a quantized weight can have at its kept positions if it holds these numbers there."""
    whole = filled(task, numbers, np.zeros_like(now))
    levels = weights.levels(task.consumer.value, whole, prepared.model, prepared.survey)
    return Levels(*(matrix_of(task, np.broadcast_to(part, whole.shape)) for part in levels))
