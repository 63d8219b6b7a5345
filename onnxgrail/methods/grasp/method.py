"""Implements `--method grasp`: matrices of redundant layers become pairs of narrow ones.

One shot: layers are chosen by the similarity of their input and output, one backward pass gives the effect of every
singular value on the loss, and all pairs are written at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrail.algebra.fit.lowrank import Pair, saving
from onnxgrail.algebra.fit.refit import Fitted
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Applied, Recipe, Refusal
from onnxgrail.errors import NothingToCompressError
from onnxgrail.graph.cuts.residual import Layer, layers
from onnxgrail.graph.fittable.matrices import Matrix, array_of, factor, work
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.rewrite.unique import names_kept
from onnxgrail.graph.trace.facts import constants, key
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import ticking
from onnxgrail.methods.grasp import codecs, entries
from onnxgrail.methods.grasp.choice import Candidates, Chosen, candidates, choose, sharing
from onnxgrail.methods.grasp.distances import Apart, apart
from onnxgrail.methods.grasp.entries import Errors
from onnxgrail.methods.grasp.fitting import Task, refitted, ups
from onnxgrail.methods.grasp.measure import Cursor, masks_of, outputs_of, redundancies, walk_of
from onnxgrail.methods.grasp.pairs import RANKS, Slope, pairs_of, rank, slope_of

Groups = list[tuple[ir.Node | None, list[Matrix]]]
"""Matrices by layer, with the layer's first node."""


def needs_torch(recipe: Recipe) -> bool:
    """Return True if singular values are ranked by gradients."""
    return recipe.grasp_rank in RANKS


def replace_layers(prepared: Prepared, job: Job, ledger: Ledger, slim: ir.Model) -> Applied:
    """Replace the matrices of redundant or named layers by pairs of narrow ones.

    Args:
        prepared: the original model and its data.
        job: its recipe has the fields that begin with `grasp`, `ratio`, `blocks`, `include` and `exclude`; its steps
            cache the measurements, pairs and fits of an interrupted run.
        ledger: not used; the graph shows the result of narrowing.
        slim: changed in place.

    Raises:
        UsageError: layers are named that do not exist, or more than there are.
        MissingExtraError: gradients are needed, and torch is not installed.
        NothingToCompressError: nothing was replaced, and no other method was requested.

    References:
        Liu et al. 2024, GRASP, arXiv:2501.00339.
    """
    del ledger
    recipe, run = job.recipe, _Run(prepared, job)
    facts, fixed = prepared.survey.facts, constants(slim)
    every = layers(slim, facts.shapes, fixed)
    found = candidates(slim, every, prepared.survey.blocks, fixed, recipe)
    walk = walk_of(prepared, slim, recipe)
    redundancy = run.redundancies(walk, every) if every else {}
    chosen = choose(found, redundancy, recipe)
    targets, refusals = _targets(found, chosen, recipe)
    if not targets:
        return _nothing(recipe, found, refusals, entries.of_layers(found, chosen, redundancy, {}), chosen.notes)
    groups = _groups(slim, targets, chosen, every)
    pairs, slope = run.pairs(slim, walk, groups)
    ordered = [m for _, some in groups for m in some]
    itemsize = {m.weight: array_of(m, slim.graph).dtype.itemsize for m in ordered}
    reference = copy(slim)
    with names_kept(slim.graph):
        tasks = [
            Task(m, factor(slim.graph, m, pairs[m.weight].down, pairs[m.weight].up), begin)
            for begin, some in groups
            for m in some
        ]
    fits, errors = run.settled(reference, slim, tasks, every)
    gone = {m.weight: saving(m.inputs, m.outputs, pairs[m.weight].down.shape[1]) for m in ordered}
    return Applied(
        entry=_entry(
            recipe,
            found,
            entries.of_layers(found, chosen, redundancy, pairs, errors),
            loss=None if slope is None else {"what": slope.what, "value": slope.value},
            refit=entries.of_refit(errors),
            matrices=[entries.of_matrix(m, chosen, redundancy, pairs[m.weight], fits.get(m.weight)) for m in ordered],
        ),
        refusals=tuple(refusals),
        macs=sum(work(m, facts.shapes) * gone[m.weight] for m in ordered),
        bytes=sum(gone[m.weight] * itemsize[m.weight] for m in ordered),
        notes=chosen.notes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The steps of a run, with the cached ones of an interrupted run."""

    prepared: Prepared
    job: Job

    def redundancies(self, walk: Walk, every: Sequence[Layer]) -> dict[str, float]:
        """Return the similarity of every layer's input and output."""
        masks = masks_of(self.prepared)
        tick = ticking(self.job.progress, "redundancy", len(masks))
        return self.job.steps.once(
            "grasp redundancy", lambda: redundancies(walk, every, masks, tick), codecs.REDUNDANCIES
        )

    def pairs(self, slim: ir.Model, walk: Walk, groups: Groups) -> tuple[dict[str, Pair], Slope | None]:
        """Return the pair of every matrix, and the gradients if they were used."""
        weights = [m.weight for _, some in groups for m in some]
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
        done = dict(found)
        for weight, pair in pairs_of(self.prepared, self.job.recipe, slim, groups, slope, Cursor(walk, slim), done):
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


def _targets(found: Candidates, chosen: Chosen, recipe: Recipe) -> tuple[dict[str, Matrix], list[Refusal]]:
    """Return matrices by weight, each once, and the reasons why other matrices of the chosen layers stay."""
    refusals = [r for name in chosen.matrices for r in found.refusals[name]]
    targets = {m.weight: m for some in chosen.matrices.values() for m in some}
    for matrix, other in sharing(found, chosen):
        del targets[matrix.weight]
        refusals.append(_refusal(matrix, f"its weight is shared with {other}, which stays"))
    for matrix in list(targets.values()):
        if saving(matrix.inputs, matrix.outputs, rank(matrix, recipe)) <= 0:
            del targets[matrix.weight]
            refusals.append(_refusal(matrix, "a pair of rank 1 would be no smaller"))
    return targets, refusals


def _groups(slim: ir.Model, targets: Mapping[str, Matrix], chosen: Chosen, every: Sequence[Layer]) -> Groups:
    """Group matrices by layer in the order of the network, each with the layer's first node.

    Matrices outside all layers are groups of their own, between the others.
    """
    order = {node: place for place, node in enumerate(slim.graph)}
    first = {layer.name: layer.nodes[0] for layer in every}
    groups: list[tuple[int, ir.Node | None, list[Matrix]]] = []
    seen: set[str] = set()
    for name, some in chosen.matrices.items():
        mine = [m for m in some if m.weight in targets and m.weight not in seen]
        seen.update(m.weight for m in mine)
        mine.sort(key=lambda m: min(order[n] for n in m.nodes))
        parts = [mine] if name in first else [[m] for m in mine]
        groups += [(min(order[n] for n in part[0].nodes), first.get(name), part) for part in parts if part]
    return [(begin, part) for _, begin, part in sorted(groups, key=lambda g: g[0])]


def _refusal(matrix: Matrix, reason: str) -> Refusal:
    node = matrix.nodes[0]
    return Refusal(value=matrix.weight, node=node.name or key(node), op=node.op_type, reason=reason)


def _nothing(
    recipe: Recipe,
    found: Candidates,
    refusals: Sequence[Refusal],
    layers: Sequence[Mapping[str, Any]],
    notes: tuple[str, ...],
) -> Applied:
    """Return the result if nothing is replaced; raise an error if no other method was requested."""
    if recipe.method == ("grasp",) and not recipe.keeps_everything:
        reasons = "; ".join(dict.fromkeys(r.reason for r in refusals))
        what = "no residual layer with a weight matrix" if not layers else "no matrix that can be replaced"
        raise NothingToCompressError(f"nothing could be compressed: the model has {what}{reasons and f' ({reasons})'}")
    return Applied(entry=_entry(recipe, found, layers), refusals=tuple(refusals), notes=notes)


def _entry(
    recipe: Recipe,
    found: Candidates,
    layers: Sequence[Mapping[str, Any]],
    *,
    loss: Mapping[str, Any] | None = None,
    refit: Mapping[str, Any] | None = None,
    matrices: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the report entry; without `matrices` it says that nothing was replaced."""
    return {
        "retain": recipe.grasp_retain,
        "rank_by": recipe.grasp_rank,
        "whiten": recipe.grasp_whiten,
        "loss": loss,
        "refit": refit,
        "params": found.params,
        "layers": list(layers),
        "matrices": list(matrices),
    }
