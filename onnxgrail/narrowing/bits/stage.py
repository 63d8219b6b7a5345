"""Round the matrices of one stage, from sums over rows to a record that a continued run can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.algebra.fit.choice import Rules
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Floats, Grid, Rounded
from onnxgrail.errors import DataError
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.steps.codec import Record
from onnxgrail.narrowing.bits.fit import Fit, fitted
from onnxgrail.narrowing.layers import Stage, Task, matrix_of
from onnxgrail.narrowing.two_networks import moments


def record_of(slim: Prepared, stage: Stage, sums: tuple[Floats, ...], grids: Sequence[Grid]) -> Record:
    """Round the matrices of a stage.

    Args:
        slim: the narrowed model.
        stage: its layers.
        sums: as `Pair.sums` returns them.
        grids: the form of each matrix.

    Raises:
        DataError: inputs or outputs of the layers hold NaN or infinity.
    """
    if not all(np.isfinite(one).all() for one in sums):
        names = ", ".join(dict.fromkeys(task.consumer.value for task in stage.tasks))
        raise DataError(f"the inputs or outputs of the layers with {names} hold NaN or infinity")
    rules = Rules(affine=stage.tasks[0].affine)
    fits = fitted(moments(sums, stage, None), [_numbers(task, slim) for task in stage.tasks], grids, rules)
    arrays: dict[str, Array] = {}
    for number, one in enumerate(fits):
        parts = {"codes": one.rounded.codes, "scale": one.rounded.scale, "zero": one.rounded.zero, "shift": one.shift}
        arrays |= {f"{number} {name}": array for name, array in parts.items()}
    return Record(arrays=arrays, notes={"errors": [(one.before, one.after) for one in fits]})


def _numbers(task: Task, slim: Prepared) -> Floats:
    """Return the float weights of a layer (inputs, outputs)."""
    whole = replace(task, made=np.ones(task.outputs, dtype=bool))
    return matrix_of(whole, weights.original(task.consumer.value, slim.model, slim.survey))


def fits_of(record: Record, grids: Sequence[Grid]) -> list[Fit]:
    """Return the matrices of a record that `record_of` made."""
    found = []
    for number, (grid, errors) in enumerate(zip(grids, record.notes["errors"], strict=True)):
        codes, scale, zero, shift = (record.arrays[f"{number} {name}"] for name in ("codes", "scale", "zero", "shift"))
        found.append(Fit(Rounded(codes, scale, zero, grid), shift, *errors))
    return found
