"""Walk over the matrices of a model in the order of the network, and round each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Floats, Rounded
from onnxgrail.graph.bits.plan import Plan
from onnxgrail.graph.bits.store import store
from onnxgrail.graph.fittable.consumers import Consumer
from onnxgrail.graph.fittable.matrices import Matrix
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.io.shelves import shelved
from onnxgrail.graph.rewrite.shift import shift_biases
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.amounts import fit_bytes
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import Tick, ticking
from onnxgrail.machine.steps.codec import RECORD
from onnxgrail.narrowing.bits.fit import Fit
from onnxgrail.narrowing.bits.sides import Guide, Sides, opened, stages, too_large
from onnxgrail.narrowing.bits.stage import fits_of, least, record_of, untargeted
from onnxgrail.narrowing.bits.store import Entry, entry, nearest_matrix, nearest_table
from onnxgrail.narrowing.layers import Stage

ALONE = "not fitted to the dense network"


class Walk:
    """A walk over the matrices of a graph, which is changed in place."""

    def __init__(self, made: ir.Model, plan: Plan, job: Job) -> None:
        self._made, self._plan, self._job = made, plan, job
        self._matrices = (*plan.matrices, *plan.unpacked)
        self._by_node = {key(node): (matrix, grid) for matrix, grid in self._matrices for node in matrix.nodes}
        self._entries: dict[str, Entry] = {}
        self._large: Mapping[str, str] = {}  # nodes with matrices that take too much memory, with the reason

    def entries(self) -> tuple[Entry, ...]:
        """Return the entries of all matrices and tables."""
        names = [matrix.weight for matrix, _ in self._matrices] + [table.weight for table, _ in self._plan.tables]
        return tuple(self._entries[name] for name in names)

    def carry(self, guide: Guide, slim: Prepared) -> None:
        """Round the matrices whose inputs can be measured, given the dense model and the narrowed one in float."""
        limit, found = fit_bytes(self._job.recipe), stages(slim, self._job.recipe, self._by_node)
        todo = [stage for stage in found if min(stage.memory, least(stage)) <= limit]
        large = [stage for stage in found if stage.memory > limit]
        self._large = {task.consumer.node: too_large(Stage((task,))) for stage in large for task in stage.tasks}
        with opened(guide, slim, todo, self._job.recipe) as sides:
            tick = ticking(self._job.progress, "quantizing", len(todo) * len(slim.batches))
            now = sides.untouched
            for stage in todo:
                now = self._round(sides, stage, now, tick)

    def rest(self, why: str) -> None:
        """Round all other matrices to nearest, for the given reason, and all tables."""
        graph, recipe = self._made.graph, self._job.recipe
        for matrix, grid in self._matrices:
            if matrix.weight not in self._entries:
                large = next((self._large[key(n)] for n in matrix.nodes if key(n) in self._large), "")
                told = f"{why}: {large}" if large else why
                self._entries[matrix.weight] = nearest_matrix(graph, matrix, grid, self._plan, recipe, told)
        for table, grid in self._plan.tables:
            self._entries[table.weight] = nearest_table(graph, table, grid, recipe)

    def _round(self, sides: Sides, stage: Stage, now: Ledger, tick: Tick) -> Ledger:
        """Round the matrices of a stage, given all upstream ones; return the ledger with their new numbers."""
        steps, name = self._job.steps, f"bits {stage.first.position} {stage.first.node}"
        pair, seen, end = sides.pair(stage)
        seen = untargeted(seen) if stage.first.node in self._large else seen
        sums: list[tuple[Floats, ...]] = []
        if steps.finished([name]):
            pair.skip(seen, now, end, tick)
        else:
            sums.append(pair.sums(seen, now, end, tick))
        grids = [self._by_node[task.consumer.node][1] for task in stage.tasks]
        found = steps.once(name, lambda: record_of(sides.slim, seen, sums.pop(), grids), RECORD)
        for task, one in zip(stage.tasks, fits_of(found, grids), strict=True):
            now = self._take(sides.slim, task.consumer, one, now)
        return now

    def _take(self, slim: Prepared, consumer: Consumer, one: Fit, now: Ledger) -> Ledger:
        """Store a rounded matrix; return the ledger with its numbers, which the next layers see."""
        matrix, grid = self._by_node[consumer.node]
        shifts: Mapping[str, Array] = {consumer.node: one.shift} if one.shift.any() else {}
        if shifts:
            here = replace(now, arrays={}, shifts=shifts)
            shift_biases(self._made.graph, list(matrix.nodes), slim.survey, here)
        rounding = "carried" if one.after < one.before else "nearest"
        why = f"{ALONE}: {large}" if (large := self._large.get(consumer.node)) else ""
        said = entry(matrix.weight, matrix.nodes, grid, rounding, (one.before, one.after), why)
        self._store(matrix, one.rounded, said)
        facts = slim.survey.facts
        array = one.rounded.values(facts.dtypes[consumer.value])
        array = array if consumer.inward == 0 else array.T
        array = np.ascontiguousarray(array.reshape(facts.shapes[consumer.value]))
        array = shelved(array) if in_files(slim.model) else array
        return replace(now, arrays={**now.arrays, consumer.param: array}, shifts={**now.shifts, **shifts})

    def _store(self, matrix: Matrix, rounded: Rounded, said: Entry) -> None:
        """Store a rounded matrix in the graph, with its entry in the report."""
        self._entries[matrix.weight] = said
        store(self._made.graph, matrix, rounded, self._plan, self._job.recipe)
