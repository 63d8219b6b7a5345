"""`--method grasp`: the matrices of redundant layers become pairs of narrow ones.

One shot: layers are chosen by how alike their input and output are, one backward pass tells what every singular value
is worth to the loss, and all pairs are written at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import onnx_ir as ir

from onnxgrail.algebra.lowrank import Pair, saving
from onnxgrail.algebra.refit import Fitted
from onnxgrail.core import Applied, Progress, Recipe, Refusal
from onnxgrail.errors import NothingToCompressError
from onnxgrail.graph.cost import parameters
from onnxgrail.graph.facts import constants, key
from onnxgrail.graph.lowrank import Matrix, array_of, factor, work
from onnxgrail.graph.model_io import copy
from onnxgrail.graph.names import names_kept
from onnxgrail.graph.residual import Layer, layers
from onnxgrail.graph.survey import Ledger
from onnxgrail.grasp.choice import Candidates, Chosen, candidates, choose, sharing
from onnxgrail.grasp.fitting import Judged, Task, refitted
from onnxgrail.grasp.measure import Cursor, masks_of, redundancies, walk_of
from onnxgrail.grasp.pairs import RANKS, pairs_of, rank, slope_of
from onnxgrail.preparation import Prepared


def needs_torch(recipe: Recipe) -> bool:
    """Whether singular values are ranked by gradients."""
    return recipe.grasp_rank in RANKS


def replace_layers(prepared: Prepared, recipe: Recipe, ledger: Ledger, slim: ir.Model, progress: Progress) -> Applied:
    """Replace the matrices of redundant layers, or of those that are named, by pairs of narrow ones.

    Args:
        prepared: the model as it was, and its data.
        recipe: the fields that begin with `grasp`, `ratio`, `include` and `exclude`.
        ledger: not needed; the graph says what narrowing left.
        slim: changed in place.
        progress: called as work goes on.

    Raises:
        UsageError: names or numbers of layers that there are not.
        MissingExtraError: gradients are asked for, and torch is not installed.
        NothingToCompressError: nothing was replaced, and nothing else was asked for.

    References:
        Liu et al. 2024, GRASP, arXiv:2501.00339.
    """
    del ledger
    facts, fixed = prepared.survey.facts, constants(slim)
    every = layers(slim, facts.shapes, fixed)
    found = candidates(slim, every, fixed, recipe)
    masks = masks_of(prepared)
    walk = walk_of(prepared, slim, recipe)
    redundancy = redundancies(walk, every, masks, _ticks(progress, "redundancy", len(masks))) if every else {}
    chosen = choose(found, redundancy, recipe, parameters(prepared.model))
    targets, refusals = _targets(found, chosen, recipe)
    if not targets:
        return _nothing(recipe, refusals, _layer_rows(found, chosen, redundancy), chosen.notes)
    slope = None
    if needs_torch(recipe):
        inputs = {v.name for v in slim.graph.inputs} | fixed
        outputs = walk.source([v.name for v in slim.graph.outputs if v.name and v.name not in inputs])(0)
        slope = slope_of(prepared, recipe, slim, list(targets), outputs, _ticks(progress, "gradients", len(masks)))
    groups = _groups(slim, targets, chosen, every)
    pairs = pairs_of(prepared, recipe, slim, groups, slope, Cursor(walk, slim))
    ordered = [m for _, some in groups for m in some]
    itemsize = {m.weight: array_of(m, slim.graph).dtype.itemsize for m in ordered}
    reference = copy(slim) if recipe.grasp_refit else slim
    with names_kept(slim.graph):
        tasks = [
            Task(m, factor(slim.graph, m, pairs[m.weight].down, pairs[m.weight].up), begin)
            for begin, some in groups
            for m in some
        ]
    fits: Mapping[str, Fitted] = {}
    judged: Judged | None = None
    if recipe.grasp_refit:
        fits, judged = refitted(prepared, recipe, reference, slim, tasks, _ticks(progress, "refit", len(tasks)))
    rows = [_row(m, chosen, redundancy, pairs[m.weight], fits.get(m.weight)) for m in ordered]
    gone = {m.weight: saving(m.inputs, m.outputs, pairs[m.weight].down.shape[1]) for m in ordered}
    return Applied(
        entry={
            "retain": recipe.grasp_retain,
            "rank_by": recipe.grasp_rank,
            "whiten": recipe.grasp_whiten,
            "loss": None if slope is None else {"what": slope.what, "value": slope.value},
            "refit": None if judged is None else asdict(judged),
            "layers": _layer_rows(found, chosen, redundancy),
            "matrices": rows,
        },
        refusals=tuple(refusals),
        macs=sum(work(m, facts.shapes) * gone[m.weight] for m in ordered),
        bytes=sum(gone[m.weight] * itemsize[m.weight] for m in ordered),
        notes=chosen.notes,
    )


def _targets(found: Candidates, chosen: Chosen, recipe: Recipe) -> tuple[dict[str, Matrix], list[Refusal]]:
    """Matrices by weight, each once, and why others of the same layers stay."""
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


def _groups(
    slim: ir.Model, targets: Mapping[str, Matrix], chosen: Chosen, every: Sequence[Layer]
) -> list[tuple[ir.Node | None, list[Matrix]]]:
    """Matrices layer by layer in the order of the network, each once, behind the layer's first node.

    Those outside all layers come as groups of their own, between them.
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


def _row(
    matrix: Matrix, chosen: Chosen, redundancy: Mapping[str, float], made: Pair, fitted: Fitted | None
) -> dict[str, Any]:
    """One matrix, for the report.

    `lost` is the share of its squared norm that the kept directions do not have (of its outputs' where inputs are
    whitened); `before` and `after` are the errors of its outputs on held-out rows without and with the fit.
    """
    layer = next(name for name, some in chosen.matrices.items() if any(m.weight == matrix.weight for m in some))
    return {
        "layer": layer or None,
        "weight": matrix.weight,
        "nodes": [node.name or key(node) for node in matrix.nodes],
        "inputs": matrix.inputs,
        "outputs": matrix.outputs,
        "rank": made.down.shape[1],
        "params_before": matrix.inputs * matrix.outputs,
        "params_after": made.down.size + made.up.size,
        "redundancy": redundancy.get(layer),
        "error": {
            "lost": made.lost,
            "before": None if fitted is None else fitted.before,
            "after": None if fitted is None else fitted.after,
        },
    }


def _layer_rows(found: Candidates, chosen: Chosen, redundancy: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {"name": layer.name, "redundancy": redundancy[layer.name], "replaced": layer.name in chosen.matrices}
        for layer in found.layers
    ]


def _nothing(
    recipe: Recipe, refusals: Sequence[Refusal], rows: Sequence[Mapping[str, Any]], notes: tuple[str, ...]
) -> Applied:
    """The result where nothing is replaced; an error where that is all that was asked for."""
    if recipe.method == ("grasp",) and recipe.ratio != 0:
        reasons = "; ".join(dict.fromkeys(r.reason for r in refusals))
        what = "no residual layer with a weight matrix" if not rows else "no matrix that can be replaced"
        raise NothingToCompressError(f"nothing could be compressed: the model has {what}{reasons and f' ({reasons})'}")
    entry = {
        "retain": recipe.grasp_retain,
        "rank_by": recipe.grasp_rank,
        "whiten": recipe.grasp_whiten,
        "loss": None,
        "refit": None,
        "layers": list(rows),
        "matrices": [],
    }
    return Applied(entry=entry, refusals=tuple(refusals), notes=notes)


def _ticks(progress: Progress, stage: str, total: int) -> Callable[[], None]:
    done = iter(range(1, total + 1))
    return lambda: progress(stage, next(done, total), total)
