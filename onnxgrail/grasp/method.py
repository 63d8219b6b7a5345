"""`--method grasp`: the matrices of redundant layers become pairs of narrow ones.

One shot: layers are chosen by how alike their input and output are, one backward pass tells what every singular value
is worth to the loss, and all pairs are written at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrail.algebra.lowrank import Pair, Spectrum, attribution, best, pair, rank_of, saving, spectrum, taylor
from onnxgrail.algebra.refit import Fitted
from onnxgrail.core import Applied, Array, Floats, Progress, Recipe, Refusal
from onnxgrail.errors import ModelError, NothingToCompressError, UnsupportedOpError
from onnxgrail.graph.cost import parameters
from onnxgrail.graph.facts import constants, key
from onnxgrail.graph.lowrank import Matrix, array_of, factor, work
from onnxgrail.graph.model_io import copy
from onnxgrail.graph.names import names_kept
from onnxgrail.graph.residual import layers
from onnxgrail.graph.survey import Ledger
from onnxgrail.grasp.choice import Candidates, Chosen, candidates, choose, sharing
from onnxgrail.grasp.losses import loss_of, said
from onnxgrail.grasp.measure import Task, feeds_of, masks_of, redundancies, refitted, walk_of
from onnxgrail.preparation import Prepared

RANKS: dict[str, tuple[float, Callable[[Spectrum, Array], Floats]]] = {
    "attribution": (0.5, attribution),
    "taylor": (1.0, taylor),
}
"""Ways to rank by gradients: at which share of the weights they are taken, and the score."""


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
    loss, gradients = None, None
    if needs_torch(recipe):
        outputs = walk.source(_outputs(slim, fixed))(0)
        loss, gradients = _gradients(prepared, recipe, slim, list(targets), outputs, progress)
    pairs = {name: _pair(m, slim.graph, recipe, (gradients or {}).get(name)) for name, m in targets.items()}
    begin = {m.weight: layer.nodes[0] for layer in reversed(every) for m in chosen.matrices.get(layer.name, ())}
    reference = copy(slim) if recipe.grasp_refit else slim
    order = {node: place for place, node in enumerate(slim.graph)}
    ordered = sorted(targets.values(), key=lambda m: min(order[n] for n in m.nodes))
    itemsize = {m.weight: array_of(m, slim.graph).dtype.itemsize for m in ordered}
    with names_kept(slim.graph):
        tasks = [
            Task(m, factor(slim.graph, m, pairs[m.weight].down, pairs[m.weight].up), begin.get(m.weight))
            for m in ordered
        ]
    fits: Mapping[str, Fitted] = {}
    if recipe.grasp_refit:
        fits = refitted(prepared, recipe, reference, slim, tasks, _ticks(progress, "refit", len(tasks)))
    rows = [_row(m, chosen, redundancy, pairs[m.weight], fits.get(m.weight)) for m in ordered]
    gone = {m.weight: saving(m.inputs, m.outputs, pairs[m.weight].down.shape[1]) for m in ordered}
    return Applied(
        entry={
            "retain": recipe.grasp_retain,
            "rank_by": recipe.grasp_rank,
            "loss": None if loss is None else {"what": loss[0], "value": loss[1]},
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
        rank = rank_of(matrix.inputs, matrix.outputs, recipe.grasp_retain)
        if saving(matrix.inputs, matrix.outputs, rank) <= 0:
            del targets[matrix.weight]
            refusals.append(_refusal(matrix, "a pair of rank 1 would be no smaller"))
    return targets, refusals


def _refusal(matrix: Matrix, reason: str) -> Refusal:
    node = matrix.nodes[0]
    return Refusal(value=matrix.weight, node=node.name or key(node), op=node.op_type, reason=reason)


def _gradients(
    prepared: Prepared,
    recipe: Recipe,
    slim: ir.Model,
    names: Sequence[str],
    outputs: Mapping[str, Array],
    progress: Progress,
) -> tuple[tuple[str, float], Mapping[str, Array]]:
    """The loss in words with its value, and its gradients by weight."""
    from onnxgrail.torchgraph.slope import slopes

    feeds = feeds_of(prepared, slim)
    share, _ = RANKS[recipe.grasp_rank]
    loss = loss_of(slim, feeds[0](), outputs, share=share)
    if loss is None:
        raise ModelError("no output is of floating point, so there is no loss", hint="Use --grasp-rank magnitude")
    expected = {name: outputs[name] for name in loss.outputs}
    tick = _ticks(progress, "gradients", len(feeds))
    try:
        found = slopes(slim, names, feeds, masks_of(prepared), loss, expected=expected, tick=tick)
    except UnsupportedOpError as error:
        hint = "Rank without gradients: --grasp-rank magnitude"
        raise UnsupportedOpError(str(error.args[0]), hint=hint, op=error.op) from error
    return (said(loss), found.loss), found.gradients


def _outputs(slim: ir.Model, fixed: Collection[str]) -> list[str]:
    """Outputs that are computed from inputs."""
    inputs = {v.name for v in slim.graph.inputs}
    return [v.name for v in slim.graph.outputs if v.name and v.name not in inputs and v.name not in fixed]


def _pair(matrix: Matrix, graph: ir.Graph, recipe: Recipe, gradient: Array | None) -> Pair:
    """What replaces a matrix; the gradient is laid out as the weight is stored."""
    found = spectrum(array_of(matrix, graph))
    scores: Floats = found.values
    if gradient is not None:
        _, score = RANKS[recipe.grasp_rank]
        scores = score(found, gradient.T if matrix.turned else gradient)
    return pair(found, best(scores, rank_of(matrix.inputs, matrix.outputs, recipe.grasp_retain)))


def _row(
    matrix: Matrix, chosen: Chosen, redundancy: Mapping[str, float], made: Pair, fitted: Fitted | None
) -> dict[str, Any]:
    """One matrix, for the report: `lost` is the share of its squared norm that the kept directions do not have."""
    layer = next(name for name, some in chosen.matrices.items() if any(m.weight == matrix.weight for m in some))
    rank = made.down.shape[1]
    return {
        "layer": layer or None,
        "weight": matrix.weight,
        "nodes": [node.name or key(node) for node in matrix.nodes],
        "inputs": matrix.inputs,
        "outputs": matrix.outputs,
        "rank": rank,
        "params_before": matrix.inputs * matrix.outputs,
        "params_after": rank * (matrix.inputs + matrix.outputs),
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
        "loss": None,
        "layers": list(rows),
        "matrices": [],
    }
    return Applied(entry=entry, refusals=tuple(refusals), notes=notes)


def _ticks(progress: Progress, stage: str, total: int) -> Callable[[], None]:
    done = iter(range(1, total + 1))
    return lambda: progress(stage, next(done, total), total)
