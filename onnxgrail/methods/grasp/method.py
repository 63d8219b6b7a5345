"""Implements `--method grasp`: matrices of redundant layers become pairs of narrow ones.

One shot: layers are chosen by the similarity of their input and output, one backward pass gives the effect of every
singular value on the loss, and all pairs are written at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrail.algebra.fit.lowrank import saving
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Applied, Recipe, Refusal
from onnxgrail.errors import NothingToCompressError
from onnxgrail.graph.cuts.residual import layers
from onnxgrail.graph.fittable.matrices import array_of, factor, work
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.rewrite.unique import names_kept
from onnxgrail.graph.trace.facts import constants
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.methods.grasp import entries
from onnxgrail.methods.grasp.choice import Candidates, candidates, choose
from onnxgrail.methods.grasp.fitting import Task
from onnxgrail.methods.grasp.measure import walk_of
from onnxgrail.methods.grasp.steps import Run
from onnxgrail.methods.grasp.targets import groups_of, targets_of


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
    recipe, run = job.recipe, Run(prepared, job)
    facts, fixed = prepared.survey.facts, constants(slim)
    every = layers(slim, facts.shapes, fixed)
    found = candidates(slim, every, prepared.survey.blocks, fixed, recipe)
    walk = walk_of(prepared, slim, recipe)
    redundancy = run.redundancies(walk, every) if every else {}
    chosen = choose(found, redundancy, recipe)
    targets, refusals = targets_of(found, chosen, recipe)
    if not targets:
        return _nothing(recipe, found, refusals, entries.of_layers(found, chosen, redundancy, {}), chosen.notes)
    groups = groups_of(slim, targets, chosen, every)
    pairs, slope = run.pairs(slim, walk, groups)
    ordered = [m for group in groups for m in group.matrices]
    itemsize = {m.weight: array_of(m, slim.graph).dtype.itemsize for m in ordered}
    reference = copy(slim)
    with names_kept(slim.graph):
        tasks = [
            Task(m, factor(slim.graph, m, pairs[m.weight].down, pairs[m.weight].up), group.begin)
            for group in groups
            for m in group.matrices
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
        text = f"nothing could be compressed: the model has {what}{reasons and f' ({reasons})'}"
        raise NothingToCompressError(text, hint=found.left_out)
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
