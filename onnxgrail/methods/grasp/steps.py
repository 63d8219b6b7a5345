"""The steps of GRASP, of which an interrupted run has finished some: measurements, pairs, fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.algebra.fit.choice import Fitted
from onnxgrail.algebra.fit.lowrank import Pair
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Recipe
from onnxgrail.graph.cuts.residual import Layer
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import ticking
from onnxgrail.methods.grasp import codecs
from onnxgrail.methods.grasp.distances import Apart, apart
from onnxgrail.methods.grasp.entries import Errors
from onnxgrail.methods.grasp.fitting import Task, refitted, ups
from onnxgrail.methods.grasp.measure import Cursor, outputs_of, redundancies
from onnxgrail.methods.grasp.pairs import RANKS, Slope, pairs_of, slope_of
from onnxgrail.methods.grasp.targets import Group


def needs_torch(recipe: Recipe) -> bool:
    """Return True if singular values are ranked by gradients."""
    return recipe.grasp_rank in RANKS


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The steps of a run, with the cached ones of an interrupted run."""

    prepared: Prepared
    job: Job

    def redundancies(self, walk: Walk, every: Sequence[Layer]) -> dict[str, float]:
        """Return the similarity of every layer's input and output."""
        masks = self.prepared.masks()
        tick = ticking(self.job.progress, "redundancy", len(masks))
        return self.job.steps.once(
            "grasp redundancy", lambda: redundancies(walk, every, masks, tick), codecs.REDUNDANCIES
        )

    def pairs(self, slim: ir.Model, walk: Walk, groups: Sequence[Group]) -> tuple[dict[str, Pair], Slope | None]:
        """Return the pair of every matrix, and the gradients if they were used."""
        weights = [m.weight for group in groups for m in group.matrices]
        steps = self.job.steps
        known = {w: steps.known(codecs.pair_key(w)) for w in weights}
        found = {w: codecs.PAIR.decode(record) for w, record in known.items() if record is not None}
        missing = [w for w in weights if w not in found]
        slope = None
        if needs_torch(self.job.recipe):
            slope = codecs.slope(steps, missing, lambda: self._slope(slim, walk, weights))
        tick = ticking(self.job.progress, "pairs", len(weights))
        for _ in found:
            tick()
        cursor, done = Cursor(walk, slim), frozenset(found)
        for weight, pair in pairs_of(self.prepared, self.job.recipe, cursor, groups, slope, done):
            steps.keep(codecs.pair_key(weight), codecs.PAIR.encode(pair))
            found[weight] = pair
            tick()
        return found, slope

    def _slope(self, slim: ir.Model, walk: Walk, weights: Sequence[str]) -> Slope:
        outputs = walk.source(outputs_of(slim))(0)
        tick = ticking(self.job.progress, "gradients", len(self.prepared.batches))
        return slope_of(self.prepared, self.job.recipe, slim, weights, outputs, tick)

    def settled(
        self, reference: ir.Model, slim: ir.Model, tasks: Sequence[Task], every: Sequence[Layer]
    ) -> tuple[dict[str, Fitted], Errors]:
        """Fit the pairs if requested, and measure the errors without and with the fits.

        Each fit improves its own outputs, whatever the effect on later ones. So all fits together are reverted if the
        error of the whole model does not decrease.
        """
        old = ups(slim, tasks)
        before = self._apart("before", reference, slim, every)
        if not self.job.recipe.grasp_refit:
            return {}, Errors(before)
        tick = ticking(self.job.progress, "refit", len(tasks))
        fits = refitted(self.prepared, self.job.recipe, (reference, slim), tasks, self.job.steps, tick)
        after = self._apart("after", reference, slim, every)
        taken = after.model < before.model
        if not taken:
            for name, tensor in old.items():
                slim.graph.initializers[name].const_value = tensor
        return fits, Errors(before, after, taken)

    def _apart(self, when: str, reference: ir.Model, slim: ir.Model, every: Sequence[Layer]) -> Apart:
        return self.job.steps.once(
            f"grasp apart {when}",
            lambda: apart(self.prepared, self.job.recipe, reference, slim, every),
            codecs.APART,
        )
