"""Round the matrices of one stage, from sums over rows to a record that a continued run can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.algebra.fit.choice import Rules
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Floats, Grid, Rounded
from onnxgrail.errors import DataError
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.steps.codec import Record
from onnxgrail.narrowing.bits.fit import Fit, alone, fitted
from onnxgrail.narrowing.layers import Stage, Task, matrix_of
from onnxgrail.narrowing.two_networks import moments

TOGETHER = 512  # outputs of a matrix without targets that are rounded at once


def least(stage: Stage) -> int:
    """Return the bytes that rounding takes at most if no targets are summed."""
    features, outputs = stage.features, stage.outputs
    at_once = 5 * features**2 + 8 * features * min(TOGETHER, outputs)  # measured on 5632 x 2048
    return 8 * at_once + 10 * features * outputs  # codes, and float numbers twice


def untargeted(stage: Stage) -> Stage:
    """Return the stage without targets, so that only second moments of its inputs are summed."""
    tasks = [replace(task, made=np.zeros_like(task.made)) for task in stage.tasks]
    return Stage(tuple(replace(task, consumer=replace(task.consumer, residual="")) for task in tasks))


def record_of(slim: Prepared, stage: Stage, sums: tuple[Floats, ...], grids: Sequence[Grid]) -> Record:
    """Round the matrices of a stage.

    Args:
        slim: the narrowed model.
        stage: its layers, perhaps without targets.
        sums: as `Pair.sums` returns them.
        grids: the form of each matrix.

    Raises:
        DataError: inputs or outputs of the layers hold NaN or infinity.
    """
    if not all(np.isfinite(one).all() for one in sums):
        names = ", ".join(dict.fromkeys(task.consumer.value for task in stage.tasks))
        raise DataError(f"the inputs or outputs of the layers with {names} hold NaN or infinity")
    affine = stage.tasks[0].affine
    if stage.outputs:
        matrices = [next(_parts(task, slim, stage.outputs)) for task in stage.tasks]
        fits = fitted(moments(sums, stage, None), matrices, grids, Rules(affine=affine))
    else:
        fits = alone(
            moments(sums, stage, None), [_parts(task, slim, TOGETHER) for task in stage.tasks], grids, affine=affine
        )
    arrays: dict[str, Array] = {}
    for number, one in enumerate(fits):
        parts = {"codes": one.rounded.codes, "scale": one.rounded.scale, "zero": one.rounded.zero, "shift": one.shift}
        arrays |= {f"{number} {name}": array for name, array in parts.items()}
    return Record(arrays=arrays, notes={"errors": [(one.before, one.after) for one in fits]})


def _parts(task: Task, slim: Prepared, most: int) -> Iterator[Floats]:
    """Yield the float weights (inputs, outputs) of a layer, for a number of outputs at a time."""
    array = weights.original(task.consumer.value, slim.model, slim.survey)
    places = np.arange(array.shape[task.consumer.outward])
    for first in range(0, len(places), most):
        yield matrix_of(replace(task, made=places // most == first // most), array)


def fits_of(record: Record, grids: Sequence[Grid]) -> list[Fit]:
    """Return the matrices of a record that `record_of` made."""
    found = []
    for number, (grid, errors) in enumerate(zip(grids, record.notes["errors"], strict=True)):
        codes, scale, zero, shift = (record.arrays[f"{number} {name}"] for name in ("codes", "scale", "zero", "shift"))
        found.append(Fit(Rounded(codes, scale, zero, grid), shift, *errors))
    return found
