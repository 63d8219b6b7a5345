"""Converts matrices to pairs: one backward pass over the model, then the spectrum of every matrix, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxgrail.algebra.fit.lowrank import Pair, Spectrum, attribution, best, pair, spectrum, taylor, whitened
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.shapes.ids import table_rows
from onnxgrail.core import Array, Feed, Floats, Recipe
from onnxgrail.errors import ModelError, UnsupportedOpError
from onnxgrail.fidelity import looks_like_logits, probable
from onnxgrail.graph.fittable.matrices import Matrix, array_of
from onnxgrail.machine.progress import Tick
from onnxgrail.methods.grasp.measure import Cursor, grams
from onnxgrail.methods.grasp.targets import Group, rank

if TYPE_CHECKING:
    from onnxgrail.torchgraph.slope import Loss


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

    feeds = prepared.fed(slim).feeds
    share, _ = RANKS[recipe.grasp_rank]
    loss = loss_of(slim, feeds[0](), outputs, share=share)
    if loss is None:
        raise ModelError("no output is of floating point, so there is no loss", hint="Use --grasp-rank magnitude")
    expected = {name: outputs[name] for name in loss.outputs}
    try:
        found = slopes(slim, names, Data(feeds, prepared.masks()), loss, expected=expected, tick=tick)
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
    masks, model = prepared.masks(), cursor.model
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


def loss_of(model: ir.Model, feed: Feed, outputs: Mapping[str, Array], *, share: float) -> Loss | None:
    """Return the loss of a model; None if it has no floating-point output.

    A language model has an output (batch, length, vocabulary) and an integer input (batch, length) that looks up rows
    of a table with as many rows as the vocabulary.

    Args:
        model: the graph.
        feed: the first batch.
        outputs: the model's outputs for it.
        share: of every weight, at which gradients are taken.
    """
    from onnxgrail.torchgraph.slope import Loss

    for name, array in outputs.items():
        ids = _ids(model, feed, array)
        if ids is not None:
            return Loss(share=share, ids=ids, rows=(name,), probable=_probable({name: array}))
    floats = {n: a for n, a in outputs.items() if a.dtype.kind in "fV" and a.size}
    rows = {n: a for n, a in floats.items() if looks_like_logits(n, a)}
    others = tuple(n for n in floats if n not in rows)
    return Loss(share=share, rows=tuple(rows), probable=_probable(rows), others=others) if floats else None


def said(loss: Loss) -> str:
    """Describe the loss for the report."""
    if loss.ids is not None:
        return f"cross entropy of {loss.rows[0]} with the next token of {loss.ids}"
    if loss.share < 1:
        words = [f"divergence of {name} from the original" for name in loss.rows]
        words += [f"squared distance of {name} from the original" for name in loss.others]
        return ", ".join(words)
    words = [f"cross entropy of {name} with its own highest class" for name in loss.rows]
    words += [f"mean square of {name}" for name in loss.others]
    return ", ".join(words)


def _ids(model: ir.Model, feed: Feed, logits: Array) -> str | None:
    """Return the input whose next tokens an output scores, None if there is none."""
    if logits.ndim != 3 or logits.dtype.kind not in "fV" or logits.shape[1] < 2:
        return None
    for name, array in feed.items():
        same = array.ndim == 2 and array.dtype.kind in "iu" and array.shape == logits.shape[:2]
        if same and table_rows(model, name) == logits.shape[2]:
            return name
    return None


def _probable(rows: Mapping[str, Array]) -> frozenset[str]:
    return frozenset(name for name, array in rows.items() if probable(array))
