"""The report entries of layers and matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxgrail.algebra.fit.choice import Fitted
from onnxgrail.algebra.fit.lowrank import Pair
from onnxgrail.graph.fittable.matrices import Matrix
from onnxgrail.graph.trace.facts import key
from onnxgrail.methods.grasp.choice import Candidates, Chosen
from onnxgrail.methods.grasp.distances import Apart


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of the model with pairs as decomposed and with fitted pairs; `taken` is True if the fits stay.

    `after` is None if nothing was fitted.
    """

    before: Apart
    after: Apart | None = None
    taken: bool = False


def of_matrix(
    matrix: Matrix, chosen: Chosen, redundancy: Mapping[str, float], made: Pair, fitted: Fitted | None
) -> dict[str, Any]:
    """Return the entry of one matrix.

    `lost` is the lost share of its squared norm (of its outputs' if inputs are whitened); `before` and `after` are the
    errors of its outputs on held-out rows without and with the fit.
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


def of_layers(
    found: Candidates,
    chosen: Chosen,
    redundancy: Mapping[str, float],
    pairs: Mapping[str, Pair],
    errors: Errors | None = None,
) -> list[dict[str, Any]]:
    """Return the entries of all layers: parameters of replaceable matrices before and after, and output errors.

    The error `before` is without the fits and `after` as written, both as shares of the original output's energy.
    """
    rows = []
    for layer in found.layers:
        sizes = [(m.inputs * m.outputs, pairs.get(m.weight)) for m in found.matrices[layer.name]]
        rows.append(
            {
                "name": layer.name,
                "redundancy": redundancy[layer.name],
                "replaced": layer.name in chosen.matrices,
                "params_before": sum(size for size, _ in sizes),
                "params_after": sum(size if made is None else made.down.size + made.up.size for size, made in sizes),
                "error": _of(layer.name, errors),
            }
        )
    return rows


def of_refit(errors: Errors) -> dict[str, Any] | None:
    """Return the errors of the whole model without and with all fits; None if there are none."""
    if errors.after is None:
        return None
    return {"before": errors.before.model, "after": errors.after.model, "taken": errors.taken}


def _of(layer: str, errors: Errors | None) -> dict[str, float | None]:
    if errors is None:
        return {"before": None, "after": None}
    final = errors.after if errors.after is not None and errors.taken else errors.before
    return {"before": errors.before.layers[layer], "after": final.layers[layer]}
