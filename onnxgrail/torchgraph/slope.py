"""Gradients of a loss with respect to weights, summed over calibration batches: one backward pass each, no steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from onnxgrail.core import Array, Bools, Feed
from onnxgrail.errors import ModelError
from onnxgrail.torchgraph.call import Tensor, as_array
from onnxgrail.torchgraph.fit import HALF
from onnxgrail.torchgraph.guard import check
from onnxgrail.torchgraph.program import program_of, tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What is differentiated.

    Attributes:
        ids: the input whose next tokens the output predicts: cross entropy, shifted by one.  None where the outputs
            are held against themselves.
        rows: outputs that hold scores of classes along their last axis: cross entropy with the class that is the
            highest; or of tokens.
        probable: those of them that hold probabilities.
        others: outputs whose mean square is taken.
    """

    ids: str | None = None
    rows: tuple[str, ...] = ()
    probable: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that it looks at."""
        return self.rows + self.others


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slopes:
    """Mean loss over batches, and the sum of its gradients over them by weight."""

    loss: float
    gradients: Mapping[str, Array]


def slopes(
    model: ir.Model,
    names: Sequence[str],
    feeds: Sequence[Callable[[], Feed]],
    masks: Sequence[Bools | None],
    loss: Loss,
    *,
    expected: Mapping[str, Array],
    tick: Callable[[], None],
) -> Slopes:
    """One pass over the data, forward and backward.

    Args:
        model: the whole graph.
        names: initializers.
        feeds: batches.
        masks: per batch, which positions count; None where all do.
        loss: what is differentiated.
        expected: what ONNX Runtime makes of the first batch, to be sure that this is the same function.
        tick: called once per batch.

    Raises:
        UnsupportedOpError: an op that gradients cannot pass.
        ModelError: torch and ONNX Runtime disagree, or the loss is not finite.
    """
    half = any(v.dtype in HALF for v in model.graph.initializers.values())
    program = program_of(model, floats=torch.float32 if half else None)
    with torch.no_grad():
        check(program.run(tensors(feeds[0](), program.floats), list(expected)), expected, "the model")
    weights = {n: program.weights[n].detach().clone().requires_grad_() for n in names}
    total = 0.0
    for make, mask in zip(feeds, masks, strict=True):
        given = tensors(make(), program.floats)
        found = program.run(given, list(loss.outputs), override=weights)
        value = _value(loss, given, found, mask)
        value.backward()
        total += float(value.detach())
        tick()
    if not np.isfinite(total):
        raise ModelError("the loss on the calibration data is not finite, so nothing can be ranked by it")
    wide = np.dtype(np.float64)
    gradients = {n: as_array(w.grad if w.grad is not None else torch.zeros_like(w), wide) for n, w in weights.items()}
    return Slopes(loss=total / len(feeds), gradients=gradients)


def _value(loss: Loss, given: Mapping[str, Tensor], found: Mapping[str, Tensor], mask: Bools | None) -> Tensor:
    seen = torch.from_numpy(np.ascontiguousarray(mask)) if mask is not None else None
    terms = [_rows(found[n], loss, n, given, seen) for n in loss.rows]
    terms += [_square(found[n], seen) for n in loss.others]
    return torch.stack(terms).sum()


def _rows(y: Tensor, loss: Loss, name: str, given: Mapping[str, Tensor], seen: Tensor | None) -> Tensor:
    """Cross entropy with the next token, or with the row's own highest class."""
    y = y.clamp(min=1e-30).log() if name in loss.probable else torch.log_softmax(y, dim=-1)
    if loss.ids is not None:
        goal, y = given[loss.ids][:, 1:], y[:, :-1]
        seen = seen[:, 1:] & seen[:, :-1] if seen is not None else None
    else:
        goal = y.detach().argmax(dim=-1)
    picked = y.gather(-1, goal.to(torch.int64).unsqueeze(-1)).squeeze(-1)
    fits = seen is not None and picked.shape == seen.shape
    return -(picked[seen] if fits else picked).mean()


def _square(y: Tensor, seen: Tensor | None) -> Tensor:
    """Half the mean square, as a share of what it is."""
    y = y[seen] if seen is not None and y.shape[:2] == seen.shape else y
    square = y.square().mean()
    return 0.5 * square / square.detach().clamp(min=1e-30)
