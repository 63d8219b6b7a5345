"""Converts matrices to pairs: one backward pass over the model, then the spectrum of every matrix, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.algebra.fit.lowrank import Pair, Spectrum, attribution, best, pair, spectrum, taylor, whitened
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Floats, Recipe
from onnxgrail.errors import ModelError, UnsupportedOpError
from onnxgrail.graph.fittable.matrices import Matrix, array_of
from onnxgrail.machine.progress import Tick
from onnxgrail.methods.grasp.losses import loss_of, said
from onnxgrail.methods.grasp.measure import Cursor, feeds_of, grams, masks_of
from onnxgrail.methods.grasp.targets import Group, rank

RANKS: dict[str, tuple[float, Callable[[Spectrum, Array], Floats]]] = {
    "attribution": (0.5, attribution),
    "taylor": (1.0, taylor),
}
"""Rankings by gradients: the share of the weights at which gradients are taken, and the score."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slope:
    """A loss in words, its value where gradients were taken, and gradients by weight, in the layout of the model."""

    what: str
    value: float
    gradients: Mapping[str, Array]


def slope_of(
    prepared: Prepared, recipe: Recipe, slim: ir.Model, names: Sequence[str], outputs: Mapping[str, Array], tick: Tick
) -> Slope:
    """Compute gradients for all matrices at once, in one forward and backward pass over the data.

    Raises:
        ModelError: there is no loss.
        UnsupportedOpError: an op has no gradient.
    """
    from onnxgrail.torchgraph.slope import Data, slopes

    feeds = feeds_of(prepared, slim)
    share, _ = RANKS[recipe.grasp_rank]
    loss = loss_of(slim, feeds[0](), outputs, share=share)
    if loss is None:
        raise ModelError("no output is of floating point, so there is no loss", hint="Use --grasp-rank magnitude")
    expected = {name: outputs[name] for name in loss.outputs}
    try:
        found = slopes(slim, names, Data(feeds, masks_of(prepared)), loss, expected=expected, tick=tick)
    except UnsupportedOpError as error:
        hint = "Rank without gradients: --grasp-rank magnitude"
        raise UnsupportedOpError(str(error.args[0]), hint=hint, op=error.op) from error
    return Slope(what=said(loss), value=found.loss, gradients=found.gradients)


def pairs_of(
    prepared: Prepared,
    recipe: Recipe,
    cursor: Cursor,
    groups: Sequence[Group],
    slope: Slope | None,
    known: Collection[str],
) -> Iterator[tuple[str, Pair]]:
    """Yield the weight and the pair of every matrix that is not known yet.

    Args:
        prepared: the data.
        recipe: number and ranking of kept directions.
        cursor: on the model before anything is replaced, moved forward if inputs are measured.
        groups: the matrices by layer.
        slope: gradients, if values are ranked by them.
        known: weights whose pairs an interrupted run has finished.
    """
    masks, model = masks_of(prepared), cursor.model
    for group in groups:
        begin, some = group.begin, group.matrices
        missing = [matrix for matrix in some if matrix.weight not in known]
        measured: Mapping[str, Floats] = {}
        if recipe.grasp_whiten:
            cursor.to(begin)  # the same pieces in every run: the runtime's last bits depend on where a piece begins
            measured = grams(cursor.walk, some, masks) if missing else {}
        for matrix in missing:
            weight = array_of(matrix, model.graph)
            gram = measured.get(matrix.weight)
            values = spectrum(weight) if gram is None else whitened(weight, gram)
            kept = best(_scores(values, matrix, recipe, slope), rank(matrix, recipe))
            yield matrix.weight, pair(values, kept)


def _scores(values: Spectrum, matrix: Matrix, recipe: Recipe, slope: Slope | None) -> Floats:
    if slope is None:
        return values.values
    _, score = RANKS[recipe.grasp_rank]
    gradient = slope.gradients[matrix.weight]
    return score(values, gradient.T if matrix.turned else gradient)
