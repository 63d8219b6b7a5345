"""Measures the redundancy of layers and the inputs of matrices on the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Array, Bools, Floats, Recipe
from onnxgrail.errors import DataError
from onnxgrail.graph.cuts.residual import Layer
from onnxgrail.graph.fittable.matrices import Matrix
from onnxgrail.graph.trace.facts import constants, key
from onnxgrail.machine.progress import Tick

UNKNOWN = 0.5  # cosine for tensors that cannot be compared


def walk_of(prepared: Prepared, model: ir.Model, recipe: Recipe) -> Walk:
    """Return a walk of all batches at the beginning of a model."""
    return Walk(model, prepared.survey.facts, prepared.fed(model), providers=recipe.providers)


def outputs_of(model: ir.Model) -> list[str]:
    """Return the names of outputs that nodes compute from inputs: no passed-through inputs and no constants."""
    known = {v.name for v in model.graph.inputs} | constants(model)
    return [v.name for v in model.graph.outputs if v.name and v.name not in known]


def redundancies(walk: Walk, layers: Sequence[Layer], masks: Sequence[Bools | None], tick: Tick) -> dict[str, float]:
    """Compute per layer the mean cosine between its input and its output, over all tokens that are not padding.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339, equation 1; one minus it is the block influence of ShortGPT.
    """
    wanted = list(dict.fromkeys(n for layer in layers for n in (layer.begin, layer.end)))
    fetch = [name for name in wanted if name not in walk.cache[0]]
    source = walk.source(fetch)
    sums = {layer.name: np.zeros(2) for layer in layers}
    for batch, mask in enumerate(masks):
        found = {**walk.cache[batch], **source(batch)}
        for layer in layers:
            sums[layer.name] += _cosines(found[layer.begin], found[layer.end], mask)
        tick()
    return {name: float(total / count) if count else UNKNOWN for name, (total, count) in sums.items()}


def _cosines(first: Array, last: Array, mask: Bools | None) -> Array:
    """Compute the sum of the cosines of all rows, and their number."""
    if first.shape != last.shape or first.ndim < 2:
        return np.zeros(2)
    a, b = (rows_of(array, mask).astype(np.float64) for array in (first, last))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = np.einsum("nd,nd->n", a, b) / norms
    return np.array([np.where(np.isfinite(cosines), cosines, UNKNOWN).sum(), len(cosines)])


def rows_of(array: Array, mask: Bools | None) -> Array:
    """Reshape (batch, length, channels) or (tokens, channels) to (tokens, channels), without padding."""
    return unpadded(array.reshape(-1, array.shape[-1]), array, mask)


def unpadded(rows: Array, array: Array, mask: Bools | None) -> Array:
    """Return an array's rows (tokens, ...) without padding; all rows if the mask does not fit the array."""
    return rows[mask.ravel()] if mask is not None and array.shape[:-1] in (mask.shape, (mask.size,)) else rows


def grams(walk: Walk, matrices: Sequence[Matrix], masks: Sequence[Bools | None]) -> dict[str, Floats]:
    """Compute per weight (m, n) the mean of x xT (m, m) over all rows that its products read.

    Raises:
        DataError: activations are not finite.
    """
    sources = {m.weight: [v.name or "" for node in m.nodes if (v := node.inputs[0]) is not None] for m in matrices}
    names = sorted({name for some in sources.values() for name in some})
    source = walk.source([name for name in names if name not in walk.cache[0]])
    sums: dict[str, Floats] = {}
    counts = dict.fromkeys(names, 0)
    for batch, mask in enumerate(masks):
        found = {**walk.cache[batch], **source(batch)}
        for name in names:
            x = rows_of(found[name], mask).astype(np.float32)
            sums[name] = sums.get(name, 0.0) + (x.T @ x).astype(np.float64)
            counts[name] += len(x)
    bad = next((name for name, gram in sums.items() if not np.isfinite(gram).all()), None)
    if bad is not None:
        raise DataError(f"activations of {bad!r} hold NaN or infinity, or their squares do not fit into float32")
    return {
        weight: np.add.reduce([sums[n] for n in some]) / max(sum(counts[n] for n in some), 1)
        for weight, some in sources.items()
    }


class Cursor:
    """A position of a walk that moves forward over the layers of a model, and never back."""

    def __init__(self, walk: Walk, model: ir.Model) -> None:
        self.walk, self.model, self._position = walk, model, 0
        self._places = {key(node): place for place, node in enumerate(model.graph)}

    def to(self, begin: ir.Node | None) -> None:
        """Move to a layer's first node, unless the walk is there or further; None does not move."""
        place = self._places.get(key(begin), 0) if begin is not None else 0
        if place > self._position:
            self.walk.advance(place)
            self._position = place
