"""Chooses the loss that ranks singular values: the language-model loss if there is one, else a loss without labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxgrail.calibration.shapes.ids import table_rows
from onnxgrail.core import Array, Feed
from onnxgrail.fidelity import looks_like_logits, probable

if TYPE_CHECKING:
    from onnxgrail.torchgraph.slope import Loss


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
