"""Read probes in the tensors of one batch, select valid rows and find equal probes.

Hidden activations of mixture-of-experts nodes are computed from the nodes' inputs, because no tensor holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.devices.lanes import Lane
from onnxgrail.calibration.stream.totals import Part
from onnxgrail.core import Array, Bools, Feed, Floats, Ints, Probe
from onnxgrail.graph.attributes import name_of
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.labels import Mark
from onnxgrail.graph.trace.mixture import INPUT, ROUTER, Matrix, Mixture, mixture_of
from onnxgrail.graph.trace.survey import Ledger, Survey

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * _sigmoid(x),
}


def placed(probe: Probe, marks: Sequence[Mark], ledger: Ledger) -> Probe:
    """Return the probe with its channel indices adjusted to the tensor's current width, after earlier pruning."""
    for mark in marks:
        if mark.axes == (probe.axis,) and ledger.dead[mark.labels].any():
            place = np.cumsum(~ledger.dead[mark.labels]) - 1
            return replace(probe, index=place[probe.index])
    return probe


Reader = Callable[[Feed, Bools | None], Iterator[Part]]
"""Yields the parts that a probe reads from one batch, given the padding mask."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A traced graph, and the lane of its activations."""

    model: ir.Model
    survey: Survey
    lane: Lane


def reader(probe: Probe, network: Network, ledger: Ledger) -> Reader:
    """Return a function that reads the probe from the tensors of the network in the ledger's state."""
    model, survey = network.model, network.survey
    if not probe.inside:
        some = [(n, placed(probe, survey.marks.get(n, ()), ledger)) for n in (probe.value, *probe.also)]
        return lambda found, mask: parts(found, some, mask)
    node = next(node for node in model.graph if key(node) == probe.inside[0])
    experts, flat = experts_of(node, model, survey, ledger), replace(probe, axis=1)

    def read(found: Feed, mask: Bools | None) -> Iterator[Part]:
        if not all(name in found for name in experts.inputs):  # the node lies in a branch that this batch does not take
            return
        for rows in hidden(experts, {n: network.lane.host(found[n]) for n in experts.inputs}, mask):
            yield rows, flat, None

    return read


Joint = Callable[[Feed, Feed, Bools | None], Iterator[Part]]
"""Like `Reader`, for two networks at once: features of the first network, then features of the second."""


def joint(probe: Probe, kept: Ints, network: Network, before: Ledger, after: Ledger) -> Joint:
    """Return a function that reads a probe before and after a fold.

    Args:
        probe: the probe.
        kept: (k,) indices of the block's channels that the fold keeps.
        network: the graph.
        before: the ledger without the fold.
        after: the ledger with the fold.
    """
    if probe.inside:
        first, second = (reader(probe, network, ledger) for ledger in (before, after))

        def inside(old: Feed, new: Feed, mask: Bools | None) -> Iterator[Part]:
            for (left, _, _), (right, _, _) in zip(first(old, mask), second(new, mask), strict=True):
                index = np.concatenate([probe.index, probe.index[kept] + left.shape[1]])
                yield np.concatenate([left, right], axis=1), replace(probe, axis=1, index=index), None

        return inside

    def read(old: Feed, new: Feed, mask: Bools | None) -> Iterator[Part]:
        for name in (n for n in (probe.value, *probe.also) if n in old):
            marks = network.survey.marks.get(name, ())
            folded = placed(probe, marks, after).index[kept] + old[name].shape[probe.axis]
            index = np.concatenate([placed(probe, marks, before).index, folded])
            both = network.lane.concatenate([old[name], new[name]], axis=probe.axis)
            yield both, replace(probe, index=index), rows_of(both, probe, mask)

    return read


def parts(found: Feed, probes: Sequence[tuple[str, Probe]], mask: Bools | None) -> Iterator[Part]:
    """Yield the probe's tensors that this batch computes, each with its mask of valid rows."""
    for name, probe in ((n, p) for n, p in probes if n in found):
        yield found[name], probe, rows_of(found[name], probe, mask)


def names(probes: Sequence[Probe]) -> list[str]:
    """Return the names of all tensors that the probes read, sorted."""
    return sorted({n for p in probes for n in (p.value, *p.also, *p.inside[1:])})


def same(probe: Probe) -> tuple[object, ...]:
    """Return a key that is equal for probes with equal statistics."""
    where = (probe.value, probe.also, probe.axis, probe.inside)
    return (*where, probe.pooled, probe.alone, probe.few, probe.index.shape, probe.index.tobytes())


def paired(probe: Probe, kept: Ints) -> Probe:
    """Return the probe with u + k indices: its u channels, then the k channels `kept` again."""
    return replace(probe, index=np.concatenate([probe.index, probe.index[kept]]))


def rows_of(x: Array, probe: Probe, mask: Bools | None) -> Bools | None:
    """Return the padding mask if it fits the tensor, (batch, sequence, channels) or (rows, channels); else None."""
    if mask is None or probe.axis != x.ndim - 1:
        return None
    leading = x.shape[:-1]
    return np.asarray(mask).ravel() if leading in (mask.shape, (mask.size,)) else None


def _sigmoid(x: Array) -> Array:
    from scipy.special import expit  # slow to import, and only mixtures of experts need it

    return np.asarray(expit(x))


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
