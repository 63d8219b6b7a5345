"""Hidden activations of mixture-of-experts nodes, computed from the node's inputs because no tensor holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Bools, Feed, Floats
from onnxgrail.graph.attributes import name_of
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.mixture import INPUT, ROUTER, Matrix, Mixture, mixture_of
from onnxgrail.graph.trace.survey import Ledger, Survey


def _sigmoid(x: Array) -> Array:
    from scipy.special import expit  # slow to import, and only mixtures of experts need it

    return np.asarray(expit(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * _sigmoid(x),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Experts:
    """A mixture-of-experts node with the weights that compute its hidden activations, in the state of a ledger.

    Attributes:
        form: the node's layout of weights and its attributes.
        inputs: names of the tensors of tokens and of router scores.
        up, gate: weights (E, rows, width) and biases (E, rows) of the up and gate projections; gate is None if the node
            has no separate gate weights.
        columns: (width,) mask of the token channels that are left.
        inner: number of hidden channels.
    """

    form: Mixture
    inputs: tuple[str, str]
    up: tuple[Array, Array | None]
    gate: tuple[Array, Array | None] | None
    columns: Bools
    inner: int


def experts_of(node: ir.Node, model: ir.Model, survey: Survey, ledger: Ledger) -> Experts:
    """Read the weights of a mixture-of-experts node, once for all batches."""
    form = mixture_of(node)

    def stack(matrix: Matrix) -> tuple[Array, Array | None]:
        return tuple(_now(node, k, model, survey, ledger) for k in (matrix.weight, matrix.bias))  # type: ignore[return-value]

    tokens = name_of(node, INPUT)
    last = len(survey.facts.shapes[tokens]) - 1
    columns = np.ones(survey.facts.shapes[tokens][last], dtype=bool)
    for mark in survey.marks.get(tokens, ()):
        if mark.axes == (last,):
            columns &= ~ledger.dead[mark.labels]
    return Experts(
        form=form,
        inputs=(tokens, name_of(node, ROUTER)),
        up=stack(form.up),
        gate=stack(form.gate) if name_of(node, form.gate.weight) else None,
        columns=columns,
        inner=survey.facts.shapes[name_of(node, form.down.weight)][2],
    )


def _now(node: ir.Node, operand: int, model: ir.Model, survey: Survey, ledger: Ledger) -> Array | None:
    """Return the current values of an operand in its original shape; None if the node lacks the operand."""
    name = name_of(node, operand)
    claim = survey.operands.get((key(node), operand))
    param = name if claim is None else claim.param
    return ledger.arrays.get(param, weights.original(name, model, survey)) if name else None


def hidden(experts: Experts, found: Feed, mask: Bools | None) -> Iterator[Floats]:
    """Yield, per expert, the rows (n, inner) that its down projection reads, times the expert's routing weight.

    Args:
        experts: the node.
        found: the tensors of tokens and router scores.
        mask: mask of the tokens that count; None for all.
    """
    tokens, scores = (np.asarray(found[name]) for name in experts.inputs)
    rows = tokens.reshape(-1, tokens.shape[-1]).astype(np.float32)
    chances = scores.reshape(len(rows), -1).astype(np.float32)
    if mask is not None and mask.size == len(rows):
        rows, chances = rows[mask.ravel()], chances[mask.ravel()]
    chosen = np.argsort(-chances, axis=1, kind="stable")[:, : experts.form.top]
    share = np.exp(chances - chances.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    if experts.form.normalised:
        share /= np.take_along_axis(share, chosen, axis=1).sum(axis=1, keepdims=True)
    for expert in range(len(experts.up[0])):
        mine = (chosen == expert).any(axis=1)
        if mine.any():
            yield _activated(experts, rows[mine], expert) * share[mine, expert, None]


def _activated(experts: Experts, rows: Array, expert: int) -> Array:
    made = _product(experts, experts.up, rows, expert)
    beside = None if experts.gate is None else _product(experts, experts.gate, rows, expert)
    form = experts.form
    if made.shape[1] == experts.inner:
        act = ACTIVATIONS.get(form.activation, ACTIVATIONS["silu"])(made)
        return act if beside is None else act * beside
    halves = (made[:, ::2], made[:, 1::2]) if form.interleaved else np.split(made, 2, axis=1)
    first, second = np.minimum(halves[0], form.limit), np.clip(halves[1], -form.limit, form.limit)
    return np.asarray(first * _sigmoid(form.alpha * first) * (second + form.beta))


def _product(experts: Experts, stack: tuple[Array, Array | None], rows: Array, expert: int) -> Array:
    weight, bias = stack
    matrix = np.asarray(weight[expert]).astype(np.float32)
    if matrix.shape[1] != rows.shape[1]:
        matrix = matrix[:, experts.columns]
    made: Array = rows @ matrix.T
    return made if bias is None else made + np.asarray(bias[expert], dtype=np.float32)
