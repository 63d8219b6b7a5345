"""The layers that `--compensate best` fits, grouped by the rows on which they are fitted, and records of fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Bools, Floats, Recipe
from onnxgrail.graph import slots
from onnxgrail.graph.cost.meter import dead_of, meter_of
from onnxgrail.graph.fittable.consumers import Consumer, consumers, downstream
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.io.shelves import shelved
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.steps.codec import Record

ADDED = 256  # bytes that a new bias takes besides its numbers: names, and perhaps a node
ARRAY, SHIFT = "array ", "shift "  # begin the keys of arrays and shifts in a record
WIDER = 1.5  # outputs per input from which sums with the dense input are cheaper


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """A layer with masks of its kept inputs and outputs; `affine` is True if its bias may change."""

    consumer: Consumer
    kept: Bools
    made: Bools
    affine: bool

    @property
    def taps(self) -> int:
        """Return the number of regressors per input."""
        window = self.consumer.window
        return math.prod(window.kernel) if window is not None else 1

    @property
    def features(self) -> int:
        """Return the number of regressors of the kept inputs."""
        return int(self.kept.sum()) * self.taps

    @property
    def inputs(self) -> int:
        """Return the number of regressors of all inputs."""
        return len(self.kept) * self.taps

    @property
    def outputs(self) -> int:
        """Return the number of kept outputs."""
        return int(self.made.sum())

    @property
    def whole(self) -> bool:
        """Return True if the weight keeps its shape."""
        return bool(self.kept.all() and self.made.all())

    @property
    def fresh(self) -> bool:
        """Return True if the fit adds a bias."""
        return self.affine and not self.consumer.has_bias

    @property
    def rows(self) -> tuple[object, ...]:
        """Return a key that is equal for layers fitted on the same rows."""
        return self.consumer.source, self.consumer.window, self.consumer.made, self.affine

    @property
    def goal(self) -> str:
        """Return the name of the tensor that should match the dense network's."""
        return self.consumer.total or self.consumer.output


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Layers that are fitted on the same rows."""

    tasks: tuple[Task, ...]

    @property
    def span(self) -> tuple[int, int]:
        """Return the positions of the first and the last layer."""
        return self.tasks[0].consumer.position, self.tasks[-1].consumer.position

    @property
    def first(self) -> Consumer:
        """Return the first layer, for properties that all layers share."""
        return self.tasks[0].consumer

    @property
    def features(self) -> int:
        """Return the number of regressors of each layer."""
        return self.tasks[0].features

    @property
    def outputs(self) -> int:
        """Return the number of outputs of all layers together."""
        return sum(task.outputs for task in self.tasks)

    @property
    def through(self) -> bool:
        """Return True if products are summed with the dense input x̄ instead of with the targets t̄.

        This is the case if targets are products of x̄ with dense weights W̄ and x̄ is much narrower: z x̄ᵀ W̄ equals z t̄ᵀ up
        to rounding, for the narrowed input z.
        """
        plain = all(task.consumer.plain and not task.consumer.residual for task in self.tasks)
        return plain and self.outputs >= WIDER * self.tasks[0].inputs

    @property
    def memory(self) -> int:
        """Return the bytes that fitting takes at most."""
        squares = 5 * self.features**2  # sums of two parts of the rows, the total, the factorized matrix, its factor
        return 8 * (squares + 12 * self.features * self.outputs)  # measured on 3942 x 2048

    @property
    def products(self) -> int:
        """Return the multiply-accumulates that fitting takes, roughly."""
        return self.features**2 * (self.features + 2 * self.outputs)

    @property
    def goals(self) -> list[str]:
        """Return the names of all targets, and of the dense input if products are summed with it."""
        return [*(task.goal for task in self.tasks), *([self.first.source] if self.through else ())]

    @property
    def key(self) -> str:
        """Return the cache key of the fits."""
        return f"fit {self.first.position} {self.first.node}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """The report entry of one fitted layer; errors are shares of the target's energy on held-out rows.

    A layer that was not fitted has no errors, but a reason. `clamped` fitted values exceed the range of their format;
    if clamping would change them too much, the reason says so and the layer stays as it was.
    """

    node: str
    weight: str
    alpha: float | None
    blend: float
    before: float | None
    after: float | None
    clamped: int = 0
    reason: str = ""


def stages_of(tasks: Sequence[Task]) -> list[Stage]:
    """Group neighboring layers that are fitted on the same rows."""
    return [Stage(tuple(group)) for _, group in groupby(tasks, key=lambda t: t.rows)]


def as_decided(stage: Stage, prepared: Prepared, recipe: Recipe, ledger: Ledger) -> Stage:
    """Return the stage with masks of the units that are really kept."""
    tasks = ((task, _task(task.consumer, prepared, recipe, ledger)) for task in stage.tasks)
    return replace(stage, tasks=tuple(replace(now, affine=planned.affine and now.affine) for planned, now in tasks))


def stages_at(prepared: Prepared, recipe: Recipe, widths: Mapping[str, int]) -> list[Stage]:
    """Return the layers to fit if some blocks have these widths, in node order; it does not matter which units go.

    A weight that keeps its shape and shares its numbers with other readers (a tied head) is not worth a copy.
    """
    model, survey = prepared.model, prepared.survey
    ledger = Ledger(dead=dead_of(survey, widths), arrays={})
    narrowed = [name for name, marks in survey.marks.items() if any(ledger.dead[m.labels].any() for m in marks)]
    changed = downstream(model, narrowed)
    found = [_task(c, prepared, recipe, ledger) for c in consumers(model, survey) if c.source in changed]
    copied = survey.copied()
    asked = [t for t in found if _asked(t, recipe) and not (t.whole and t.consumer.param in copied)]
    fewer = recipe.chooses_bits or recipe.quantize != "none"
    return stages_of(asked if fewer else _affordable(asked, prepared, widths))


def _affordable(tasks: Sequence[Task], prepared: Prepared, widths: Mapping[str, int]) -> list[Task]:
    """Return the layers, without new biases if these take more bytes than narrower blocks save."""
    dtypes = prepared.survey.facts.dtypes
    new = sum(t.outputs * dtypes[t.consumer.value].itemsize + ADDED for t in tasks if t.fresh)
    if new and new > meter_of(prepared.model, prepared.survey, "bytes").saved(widths):
        return [replace(t, affine=t.affine and not t.fresh) for t in tasks]
    return list(tasks)


def _asked(task: Task, recipe: Recipe) -> bool:
    """Return True if the chosen parts of the fit apply to this layer."""
    window = task.consumer.window
    small = window is None or math.prod(window.kernel) == 1 or "patch" in recipe.fit
    return small and (not task.kept.all() or "downstream" in recipe.fit)


def _task(consumer: Consumer, prepared: Prepared, recipe: Recipe, ledger: Ledger) -> Task:
    """Return a layer as the ledger leaves it."""
    shape = prepared.survey.facts.shapes[consumer.value]
    kept, made = (
        ~ledger.dead[consumer.units.get(axis, np.zeros(shape[axis], dtype=np.int64))]
        for axis in (consumer.inward, consumer.outward)
    )
    room = has_room(consumer, recipe, lost=(not kept.all(), not made.all()))
    bound = consumer.value in prepared.survey.facts.stored  # the bias of a quantized weight is tied to its scales
    return Task(consumer=consumer, kept=kept, made=made, affine=not bound and "affine" in recipe.fit and room)


def has_room(consumer: Consumer, recipe: Recipe, *, lost: tuple[bool, bool] = (False, False)) -> bool:
    """Return True if the bias of a layer may change.

    A new node for a bias is allowed only if inputs were lost and no target limits parameters or size. With such a
    target, a bias that other nodes read changes only if a copy is made anyway, since outputs were lost for this layer
    alone.

    Args:
        consumer: the layer.
        recipe: has the targets.
        lost: the layer loses inputs, and outputs.
    """
    inputs, outputs = lost
    if consumer.has_bias:
        own = consumer.room == "bias" or (consumer.room == "shared" and outputs)
        return own or not recipe.is_tight
    return not recipe.is_tight and (consumer.room == "slot" or inputs)


def matrix_of(task: Task, array: Array) -> Floats:
    """Return the kept part of a full-size weight as (features, outputs)."""
    front = np.moveaxis(array, (task.consumer.inward, task.consumer.outward), (0, 1))[task.kept][:, task.made]
    return np.moveaxis(front, 1, -1).reshape(task.features, -1).astype(np.float64)


def filled(task: Task, matrix: Floats, now: Array) -> Array:
    """Return an array with other numbers at the kept positions: the reverse of `matrix_of`."""
    array, limit = np.array(now), slots.largest(now.dtype)
    front = np.moveaxis(array, (task.consumer.inward, task.consumer.outward), (0, 1))
    shape = (int(task.kept.sum()), *front.shape[2:], int(task.made.sum()))
    values = np.moveaxis(np.clip(matrix, -limit, limit).reshape(shape), -1, 1)
    front[np.ix_(task.kept, task.made)] = values.astype(array.dtype)
    return array


def of_addition(before: Ledger, after: Ledger, notes: Mapping[str, Any]) -> Record:
    """Return the arrays and shifts that `after` adds to `before`, with notes."""
    arrays = _fresh(ARRAY, before.arrays, after.arrays) | _fresh(SHIFT, before.shifts, after.shifts)
    return Record(arrays=arrays, notes=notes)


def with_addition(ledger: Ledger, record: Record, model: ir.Model) -> Ledger:
    """Return a ledger with the additions of a record, moved into files if the model's own weights are in files."""
    arrays = _named(ARRAY, record.arrays)
    if in_files(model):
        arrays = {name: shelved(array) for name, array in arrays.items()}
    return replace(
        ledger,
        arrays={**ledger.arrays, **arrays},
        shifts={**ledger.shifts, **_named(SHIFT, record.arrays)},
    )


def _fresh(kind: str, before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{kind}{name}": array for name, array in after.items() if before.get(name) is not array}


def _named(kind: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
