"""Gradients with respect to weights, without weight updates: of a loss, and of the norm of a region's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from onnxgrail.core import Array, Bools, Feed, Floats
from onnxgrail.errors import ModelError
from onnxgrail.torchgraph.call import Tensor, as_array
from onnxgrail.torchgraph.fit import divergence, shown
from onnxgrail.torchgraph.program import agree, check, tensors, trainable

Sample = tuple[Mapping[str, Array], Bools | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss to differentiate.

    Attributes:
        share: factor of every weight at which gradients are taken; at 1 the outputs have no distance from the original
            outputs.
        ids: the input whose next tokens the output predicts: cross entropy, shifted by one.
        rows: outputs that hold scores along their last axis.  Without `ids`, the loss is their divergence from the
            original outputs; at share 1, the cross entropy with their own highest class.
        probable: outputs of `rows` that hold probabilities.
        others: outputs compared with the original outputs by squared distance; at share 1, their mean square is used.
    """

    share: float = 1.0
    ids: str | None = None
    rows: tuple[str, ...] = ()
    probable: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of all outputs in the loss."""
        return self.rows + self.others


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slopes:
    """The mean loss over batches, and the sum of its gradients over them by weight."""

    loss: float
    gradients: Mapping[str, Array]


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Batches, and per batch the mask of real tokens; None if there is no padding."""

    feeds: Sequence[Callable[[], Feed]]
    masks: Sequence[Bools | None]


def slopes(
    model: ir.Model,
    names: Sequence[str],
    data: Data,
    loss: Loss,
    *,
    expected: Mapping[str, Array],
    tick: Callable[[], None],
) -> Slopes:
    """Compute gradients in a single pass over the data, forward and backward.

    Args:
        model: the whole graph.
        names: initializers.
        data: the batches.
        loss: the loss to differentiate.
        expected: ONNX Runtime's outputs for the first batch, to check that torch computes the same function.
        tick: called once per batch.

    Raises:
        UnsupportedOpError: an operator without gradient.
        ModelError: torch and ONNX Runtime disagree, or the loss is not finite.
    """
    program = trainable(model)
    agree(program, data.feeds[0](), expected, "the model")
    weights = {n: (loss.share * program.weights[n].detach()).requires_grad_() for n in names}
    whole = loss.share < 1 and loss.ids is None
    total = 0.0
    for make, mask in zip(data.feeds, data.masks, strict=True):
        given = tensors(make(), program.floats)
        with torch.no_grad():
            goals = program.run(given, list(loss.outputs)) if whole else {}
        found = program.run(given, list(loss.outputs), override=weights)
        value = _value(loss, given, found, goals, mask)
        value.backward()
        total += float(value.detach())
        tick()
    if not np.isfinite(total):
        raise ModelError("the loss on the calibration data is not finite, so nothing can be ranked by it")
    grads = {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in weights.items()}
    kinds = {n: np.dtype(np.float64 if g.dtype == torch.float64 else np.float32) for n, g in grads.items()}
    gradients = {n: as_array(g, kinds[n]) for n, g in grads.items()}
    return Slopes(loss=total / len(data.feeds), gradients=gradients)


def _value(
    loss: Loss,
    given: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    goals: Mapping[str, Tensor],
    mask: Bools | None,
) -> Tensor:
    terms = []
    for name in loss.outputs:
        probable = name in loss.probable
        if name in goals:
            y, goal = (shown(t, mask) for t in (found[name], goals[name]))
            rows = name in loss.rows
            terms.append(divergence(y, goal, probable=probable) if rows else _square(y - goal, goal))
        elif name in loss.rows:
            terms.append(_entropy(found[name], given[loss.ids] if loss.ids is not None else None, mask, probable))
        else:
            y = shown(found[name], mask)
            terms.append(0.5 * _square(y, y.detach()))
    return torch.stack(terms).sum()


def _entropy(y: Tensor, ids: Tensor | None, mask: Bools | None, probable: bool) -> Tensor:
    """Return the cross entropy with the next token, or with the row's own highest class."""
    y = y.clamp(min=1e-30).log() if probable else torch.log_softmax(y, dim=-1)
    goal = y.detach().argmax(dim=-1) if ids is None else ids[:, 1:].to(torch.int64)
    if ids is not None:
        y = y[:, :-1]
        mask = mask[:, 1:] & mask[:, :-1] if mask is not None else None
    picked = y.gather(-1, goal.unsqueeze(-1)).squeeze(-1)
    return -shown(picked, mask).mean()


def _square(y: Tensor, like: Tensor) -> Tensor:
    """Return the mean square of `y` relative to that of `like`."""
    return y.square().mean() / like.square().mean().clamp(min=1e-30)


def gradient_sizes(
    piece: ir.Model, names: Sequence[str], samples: Iterable[Sample], expected: Mapping[str, Array]
) -> dict[str, Floats]:
    """Compute the root mean square over samples of the gradient of ||f(x)||_2, per weight element.

    Args:
        piece: computes the region's outputs from its inputs.
        names: weights to differentiate with respect to.
        samples: the region's inputs, one sample at a time, with the mask of real tokens.
        expected: ONNX Runtime's outputs for the first sample, to check that torch computes the same function.

    Raises:
        UnsupportedOpError: an operator without gradient.
        ModelError: torch and ONNX Runtime disagree.
    """
    program = trainable(piece)
    weights = {n: program.weights[n].detach().clone().requires_grad_() for n in names}
    sums = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in weights.items()}
    count = 0
    for inputs, mask in samples:
        found = program.run(tensors(inputs, program.floats), list(expected), override=weights)
        if not count:
            check({n: y.detach() for n, y in found.items()}, expected, piece.graph.name or "the model")
        size = sum(shown(y, mask).double().square().sum() for y in found.values())
        size = torch.sqrt(size)
        if float(size.detach()) > 0 and bool(torch.isfinite(size)):  # the root is not differentiable at zero
            slopes = torch.autograd.grad(size, list(weights.values()), allow_unused=True)
            for name, slope in zip(weights, slopes, strict=True):
                if slope is not None:
                    sums[name] += torch.nan_to_num(slope.double(), nan=0.0, posinf=0.0, neginf=0.0).square()
        count += 1
    return {n: np.sqrt(total.numpy() / max(count, 1)) for n, total in sums.items()}
