"""The layers that `--compensate best` fits, grouped by the rows that they are fitted on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from onnxgrail.calibration.prepare import Prepared
from onnxgrail.core import Array, Bools, Floats, Recipe
from onnxgrail.graph.fittable.consumers import Consumer, behind, consumers
from onnxgrail.graph.trace.survey import Ledger

WIDER = 1.5  # times as many outputs as inputs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """A layer with what stays of its weight: inputs kept, outputs made; and whether its bias may move."""

    consumer: Consumer
    kept: Bools
    made: Bools
    affine: bool

    @property
    def taps(self) -> int:
        """How many regressors an input makes."""
        window = self.consumer.window
        return math.prod(window.kernel) if window is not None else 1

    @property
    def features(self) -> int:
        """How many regressors the kept inputs make."""
        return int(self.kept.sum()) * self.taps

    @property
    def inputs(self) -> int:
        """How many all inputs make."""
        return len(self.kept) * self.taps

    @property
    def outputs(self) -> int:
        """How many outputs stay."""
        return int(self.made.sum())

    @property
    def rows(self) -> tuple[object, ...]:
        """What layers share that are fitted on the same rows."""
        return self.consumer.source, self.consumer.window, self.consumer.made, self.affine

    @property
    def goal(self) -> str:
        """The tensor that is to become as in the dense network."""
        return self.consumer.total or self.consumer.output


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Layers that are fitted on the same rows."""

    tasks: tuple[Task, ...]

    @property
    def span(self) -> tuple[int, int]:
        """Positions of the first and the last one."""
        return self.tasks[0].consumer.position, self.tasks[-1].consumer.position

    @property
    def first(self) -> Consumer:
        """The layer that stands for all in what they share."""
        return self.tasks[0].consumer

    @property
    def features(self) -> int:
        """How many regressors each of them has."""
        return self.tasks[0].features

    @property
    def outputs(self) -> int:
        """How many outputs they have together."""
        return sum(task.outputs for task in self.tasks)

    @property
    def through(self) -> bool:
        """Whether targets are products of the dense input, which is so much narrower that sums are taken with it.

        With z the input, z x̄ᵀ W̄ is z t̄ᵀ but for rounding, for x̄ and W̄ of the dense network.
        """
        plain = all(task.consumer.plain and not task.consumer.residual for task in self.tasks)
        return plain and self.outputs >= WIDER * self.tasks[0].inputs

    def memory(self, parts: int) -> int:
        """Bytes that fitting takes at most where sums over rows are kept in so many parts."""
        squares = (parts + 3) * self.features**2  # each part, all together, what is factorised and its factor
        return 8 * (squares + (2 * parts + 8) * self.features * self.outputs)  # measured on 3942 x 2048

    @property
    def goals(self) -> list[str]:
        """The targets of all, and what sums are taken with."""
        return [*(task.goal for task in self.tasks), *([self.first.source] if self.through else ())]

    @property
    def key(self) -> str:
        """Under what the fits are kept."""
        return f"fit {self.first.position} {self.first.node}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """One fitted layer, for the report: errors are shares of the target's energy on held-out rows.

    A layer that was not looked at has none, but a reason.  Of the fitted numbers, some may be `clamped` to the range of
    their format; where that would ruin them, the reason says so and the layer stays as it was.
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
    """Neighbours that are fitted on the same rows."""
    return [Stage(tuple(group)) for _, group in groupby(tasks, key=lambda t: t.rows)]


def as_decided(stage: Stage, prepared: Prepared, recipe: Recipe, ledger: Ledger) -> Stage:
    """The stage with the units that really stay."""
    return replace(stage, tasks=tuple(_task(task.consumer, prepared, recipe, ledger) for task in stage.tasks))


def tasks_of(prepared: Prepared, recipe: Recipe, ledger: Ledger) -> list[Task]:
    """What is to be fitted, in node order; of the ledger only matters how many units go."""
    model, survey = prepared.model, prepared.survey
    narrowed = [name for name, marks in survey.marks.items() if any(ledger.dead[m.labels].any() for m in marks)]
    changed = behind(model, narrowed)
    found = [_task(c, prepared, recipe, ledger) for c in consumers(model, survey) if c.source in changed]
    return [t for t in found if _asked(t, recipe)]


def _asked(task: Task, recipe: Recipe) -> bool:
    """Whether the parts of the fit that were chosen touch this layer."""
    window = task.consumer.window
    small = window is None or math.prod(window.kernel) == 1 or "patch" in recipe.fit
    return small and (not task.kept.all() or "behind" in recipe.fit)


def _task(consumer: Consumer, prepared: Prepared, recipe: Recipe, ledger: Ledger) -> Task:
    """A layer as the ledger leaves it; a node for a bias is made only where inputs were lost and size is not tight."""
    tight = recipe.target_params is not None or recipe.target_size is not None
    shape = prepared.survey.facts.shapes[consumer.value]
    kept, made = (
        ~ledger.dead[consumer.units.get(axis, np.zeros(shape[axis], dtype=np.int64))]
        for axis in (consumer.inward, consumer.outward)
    )
    bound = consumer.value in prepared.survey.facts.stored  # the bias of a quantised weight is tied to its scales
    room = consumer.room == "bias" or (not tight and (consumer.room == "slot" or not kept.all()))
    return Task(consumer=consumer, kept=kept, made=made, affine=room and not bound and "affine" in recipe.fit)


def matrix_of(task: Task, array: Array) -> Floats:
    """What stays of a weight of full size, as (features, outputs)."""
    front = np.moveaxis(array, (task.consumer.inward, task.consumer.outward), (0, 1))[task.kept][:, task.made]
    return np.moveaxis(front, 1, -1).reshape(task.features, -1).astype(np.float64)
