"""Published methods that remove heads, neurons and what is inside heads, re-implemented by us after their papers.

A group of heads is one key-value head with its query heads; it is removed as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bench.published import transformer
from bench.published.methods import STEPS, Dense, Floats, Plan, Plans, damped, moment, single
from bench.published.transformer import Array, Ints, Layer, Net

STARTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # ratio of the first layer over the mean, of SlimGPT
TEMPERATURES = (0.01, 0.1, 0.3, 0.5, 1.0)  # of the softmax over layers, of MoDeGPT
MANY = 192  # steps in which SlimGPT would remove all neurons, if there are more of them
MOST = 0.9  # of a layer that MoDeGPT removes


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Widths of a layer: groups of heads, rotary pairs and value channels of each head, neurons."""

    groups: int
    pairs: int
    values: int
    neurons: int


def size(net: Net, layers: Sequence[Widths]) -> int:
    """Count the parameters of a network with these widths."""
    removed = sum(cost(layer, full(layer)) - cost(layer, w) for layer, w in zip(net.layers, layers, strict=True))
    return transformer.parameters(net) - removed


def cost(layer: Layer, w: Widths) -> int:
    """Count what the widths decide of a layer: matrices, and the biases of queries and neurons."""
    channels, queries = len(layer.q[0]), w.groups * layer.shared * layer.parts * w.pairs
    total = channels * w.groups * (layer.shared + 1) * (layer.parts * w.pairs + w.values)
    total += channels * (len(layer.matrices) - 4) * w.neurons
    return total + queries * (layer.bias_q is not None) + w.neurons * (layer.bias_up is not None)


def full(layer: Layer) -> Widths:
    """Return the widths of a dense layer."""
    groups, pairs = layer.pairs.shape
    return Widths(groups=groups, pairs=pairs, values=layer.parts * pairs, neurons=layer.down[0].shape[0])


def without(layer: Layer, groups: Ints, neurons: Ints) -> Layer:
    """Keep these groups of heads and these neurons."""

    def columns(matrix: Array) -> Array:
        cut = matrix.reshape(*matrix.shape[:-1], len(layer.pairs), -1)[..., groups, :]
        return cut.reshape(*matrix.shape[:-1], -1)

    return replace(
        layer,
        **{name: (columns(getattr(layer, name)[0]),) for name in "qkv"},
        **{name: (getattr(layer, name)[0][:, neurons],) for name in ("gate", "up") if name in layer.matrices},
        o=(layer.o[0][rows_of(layer, groups)],),
        down=(layer.down[0][neurons],),
        pairs=layer.pairs[groups],
        bias_q=None if layer.bias_q is None else columns(layer.bias_q),
        bias_up=None if layer.bias_up is None else layer.bias_up[neurons],
    )


def rows_of(layer: Layer, groups: Ints) -> Ints:
    """Return the rows of the matrix `o` that groups of heads feed."""
    width = layer.o[0].shape[0] // len(layer.pairs)
    return np.asarray((np.asarray(groups)[:, None] * width + np.arange(width)).reshape(-1))


# ----------------------------------------------------------------------------------------------------------- FLAP


def flap(dense: Dense) -> Plans:
    """Remove what fluctuates least, and add its mean as a bias (An et al. 2024, arXiv 2312.11983).

    Equation 5: the score of an input is its variance times the squared norm of its row; section 3.3: scores are
    standardized per layer and per kind, a group of heads has the mean of its inputs, and one threshold is taken over
    all; equation 4: the bias is the mean of the removed inputs times their rows.  The code of the authors squares the
    scores of heads before that; both ways are tried.
    """
    return {name: _flap_plans(dense, power) for name, power in (("", 1), ("scores of heads squared", 2))}


def _flap_plans(dense: Dense, power: int) -> list[Plan]:
    units = ranked(dense, power)
    left = [[set(range(full(x).groups)), set(range(full(x).neurons))] for x in dense.net.layers]
    plans = [Plan(params=size(dense.net, [full(x) for x in dense.net.layers]), make=lambda: dense.net)]
    for _, layer, kind, unit in units:
        if len(left[layer][kind]) == 1:  # the last one of its kind stays
            continue
        left[layer][kind].remove(unit)
        kept = [(np.array(sorted(heads)), np.array(sorted(neurons))) for heads, neurons in left]
        plans.append(Plan(params=_flap_size(dense.net, kept), make=partial(_fluctuating, dense, kept)))
    return plans


def ranked(dense: Dense, power: int) -> list[tuple[float, int, int, int]]:
    """Return all units as (score, layer, 0 for heads or 1 for neurons, number), lowest first."""
    units = []
    for at, layer in enumerate(dense.net.layers):
        for kind, (part, name, count) in enumerate(
            (("a", "o", full(layer).groups), ("h", "down", full(layer).neurons))
        ):
            variance = np.diag(dense.moments[at][part]) - dense.means[at][part] ** 2
            score = variance * (getattr(layer, name)[0].astype(np.float64) ** 2).sum(axis=1)
            score = score**power if kind == 0 else score
            standard = ((score - score.mean()) / score.std(ddof=1)).reshape(count, -1).mean(axis=1)
            units += [(float(value), at, kind, unit) for unit, value in enumerate(standard)]
    return sorted(units)


def _flap_size(net: Net, kept: Sequence[tuple[Ints, Ints]]) -> int:
    widths = [replace(full(x), groups=len(g), neurons=len(n)) for x, (g, n) in zip(net.layers, kept, strict=True)]
    total = size(net, widths)
    for layer, w in zip(net.layers, widths, strict=True):  # biases that are new
        total += net.channels * (layer.bias_o is None and w.groups < full(layer).groups)
        total += net.channels * (layer.bias_down is None and w.neurons < full(layer).neurons)
    return total


def _fluctuating(dense: Dense, kept: Sequence[tuple[Ints, Ints]]) -> Net:
    layers = []
    for layer, means, (groups, neurons) in zip(dense.net.layers, dense.means, kept, strict=True):
        gone = np.setdiff1d(np.arange(len(means["a"])), rows_of(layer, groups))
        dead = np.setdiff1d(np.arange(len(means["h"])), neurons)
        bias_o = shifted(layer.bias_o, means["a"][gone], layer.o[0][gone])
        bias_down = shifted(layer.bias_down, means["h"][dead], layer.down[0][dead])
        layers.append(replace(without(layer, groups, neurons), bias_o=bias_o, bias_down=bias_down))
    return transformer.widened(dense.net, layers=tuple(layers))


def shifted(bias: Array | None, means: Floats, rows: Array) -> Array | None:
    """Add the means of removed inputs times their rows to a bias."""
    if not len(rows):
        return bias
    added = (means @ rows).astype(np.float32)
    return added if bias is None else bias + added


# -------------------------------------------------------------------------------------------------------- SlimGPT


def slimgpt(dense: Dense) -> Plans:
    """Remove units layer by layer with the Optimal Brain Surgeon (Ling et al. 2024, arXiv 2412.18110).

    Section 3.2: the error of a group of heads is the sum of ‖W_i‖² / L_ii² over its rows, with the Cholesky factor L of
    its block of H⁻¹; the unit with the smallest is removed, the remaining rows are updated, and so on.  Section 3.3:
    ratios rise as r_i = r_0 + (r_(n-1) − r_0) log(i + 1) / log n.  H comes from what is pruned upstream.  Neurons go
    one at a time, of 384 and more a 192nd at once: the paper's groups of them only save time.
    """
    return {f"first layer {start:g} of the mean": list(_slim_plans(dense, start)) for start in STARTS}


def _slim_plans(dense: Dense, start: float) -> Iterator[Plan]:
    count = len(dense.net.layers)
    rise = np.log(np.arange(count) + 1) / math.log(count)
    for mean in np.linspace(0, 1, STEPS, endpoint=False):
        ratios = mean * (start + (1 - start) * rise / rise.mean())
        if ratios.max() < 1:
            kept = [
                replace(f, groups=max(1, round((1 - r) * f.groups)), neurons=max(1, round((1 - r) * f.neurons)))
                for f, r in zip(map(full, dense.net.layers), ratios.tolist(), strict=True)
            ]
            yield Plan(params=size(dense.net, kept), make=partial(_surgeon, dense, kept))


def _surgeon(dense: Dense, kept: Sequence[Widths]) -> Net:
    net, layers, x = dense.net, [], transformer.entered(dense.net, dense.inputs)
    for whole, widths in zip(net.layers, kept, strict=True):
        a = transformer.mixed(net, whole, transformer.normed(net, x))
        groups, o = eliminated(whole.o[0], moment(a), len(whole.pairs), widths.groups)
        layer = replace(whole, o=(o,))
        mid = transformer.after_heads(net, layer, x, a)
        h = transformer.hidden(layer, transformer.normed(net, mid))
        count = full(layer).neurons
        neurons, down = eliminated(layer.down[0], moment(h), count, widths.neurons, together=max(1, count // MANY))
        layer = replace(layer, down=(down,))
        layers.append(without(layer, groups, neurons))
        x = transformer.after_mlp(net, layer, mid, h)
    return transformer.widened(net, layers=tuple(layers))


def eliminated(W: Array, H: Floats, units: int, keep: int, *, together: int = 1) -> tuple[Ints, Array]:
    """Return the units that stay and the updated matrix (in, out), whose other rows are 0."""
    left, inverse = W.astype(np.float64), np.linalg.inv(damped(H, 0.01))
    width, alive = len(W) // units, np.arange(units)
    while len(alive) > keep:
        at = np.arange(len(left)).reshape(-1, width)
        L = np.linalg.cholesky(inverse[at[:, :, None], at[:, None, :]])
        errors = (left**2).sum(axis=1).reshape(-1, width) / np.diagonal(L, axis1=1, axis2=2) ** 2
        count = min(len(alive) - keep, max(1, together // width))
        gone = np.sort(np.argsort(errors.sum(axis=1), kind="stable")[:count])
        rest, gone_rows = np.delete(at, gone, axis=0).reshape(-1), at[gone].reshape(-1)
        moved = np.linalg.solve(inverse[np.ix_(gone_rows, gone_rows)], inverse[np.ix_(gone_rows, rest)])
        left = left[rest] - moved.T @ left[gone_rows]
        inverse = inverse[np.ix_(rest, rest)] - inverse[np.ix_(rest, gone_rows)] @ moved
        alive = np.delete(alive, gone)
    new = np.zeros_like(W)
    new.reshape(units, width, -1)[alive] = left.reshape(len(alive), width, -1)
    return alive, new


# -------------------------------------------------------------------------------------------------------- MoDeGPT


def modegpt(dense: Dense) -> Plans:
    """Decompose pairs of matrices (Lin et al. 2025, arXiv 2408.09632).

    Algorithm 1: neurons by the ridge leverage scores diag(C (C + I)⁻¹), C the sum over tokens, and the next matrix
    (S'CS)⁺ S'C W.  I is small beside C of many tokens, and all scores are then near 1; a multiple of I with the mean
    diagonal of C is tried too.  Algorithm 2: rotary pairs by ‖C^½ W_Q‖ ‖C^½ W_K‖, without rotation channels.
    Algorithm 3: values and outputs by the SVD of C^½ W_V W_O.  Section 3.3: a layer loses L φ softmax(−s / ε), s its
    block influence, the same ratio in all three.
    """
    ridges = {"": 1.0, "I of the mean diagonal": None}
    return {
        ", ".join(filter(None, (f"ε {temperature:g}", name))): list(_mode_plans(dense, temperature, ridge))
        for temperature in TEMPERATURES
        for name, ridge in ridges.items()
    }


def _mode_plans(dense: Dense, temperature: float, ridge: float | None) -> Iterator[Plan]:
    score = -np.array(dense.influence) / temperature
    shares = np.exp(score - score.max())
    for mean in np.linspace(0, MOST, STEPS, endpoint=False):
        kept = []
        for f, r in zip(map(full, dense.net.layers), capped(len(shares) * mean, shares), strict=True):
            neurons, pairs, values = (max(1, round((1 - r) * n)) for n in (f.neurons, f.pairs, f.values))
            kept.append(replace(f, neurons=neurons, pairs=pairs, values=values))
        yield Plan(params=size(dense.net, kept), make=partial(_decomposed, dense, kept, ridge))


def capped(total: float, shares: Floats) -> list[float]:
    """Distribute a total over layers by shares; what would be above the largest ratio goes to the others."""
    ratios, free = np.zeros(len(shares)), np.ones(len(shares), dtype=bool)
    while free.any():
        given = (total - MOST * (~free).sum()) * shares[free] / shares[free].sum()
        ratios[free] = np.minimum(given, MOST)
        if (given <= MOST).all():
            break
        free[np.flatnonzero(free)[given > MOST]] = False
        ratios[~free] = MOST
    return [float(ratio) for ratio in ratios]


def _decomposed(dense: Dense, kept: Sequence[Widths], ridge: float | None) -> Net:
    layers = []
    for layer, moments, means, widths in zip(dense.net.layers, dense.moments, dense.means, kept, strict=True):
        new = layer
        if widths.neurons < full(layer).neurons:
            C = moments["h"]
            least = np.trace(C) / len(C) if ridge is None else ridge / dense.tokens
            neurons, down = nystrom(C, layer.down[0], widths.neurons, least)
            new = replace(without(layer, np.arange(len(layer.pairs)), neurons), down=(down,))
        if widths.pairs < full(layer).pairs:
            new = picked(new, moments["z"], means["z"], widths.pairs)
        if widths.values < full(layer).values:
            new = joined(new, moments["z"], widths.values)
        layers.append(new)
    return transformer.widened(dense.net, layers=tuple(layers))


def nystrom(C: Floats, W: Array, keep: int, ridge: float) -> tuple[Ints, Array]:
    """Return the neurons of the largest leverage and the matrix that reads them."""
    leverage = np.diag(np.linalg.solve(C + ridge * np.eye(len(C)), C))
    index = np.sort(np.argsort(-leverage, kind="stable")[:keep])
    (down,) = single(np.linalg.pinv(C[np.ix_(index, index)], hermitian=True) @ C[index] @ W)
    return index, down


def picked(layer: Layer, C: Floats, mean: Floats, keep: int) -> Layer:
    """Keep the pairs with the largest product of energies of queries and keys."""
    groups, pairs = layer.pairs.shape
    q = layer.q[0].reshape(-1, groups, layer.shared, layer.parts, pairs)
    k = layer.k[0].reshape(-1, groups, layer.parts, pairs)
    energies = [np.einsum("ig...,ij,jg...->g...", m, C, m, optimize=True) for m in (q, k)]
    bias = None if layer.bias_q is None else layer.bias_q.reshape(q.shape[1:])
    if bias is not None:
        energies[0] += 2 * bias * np.einsum("i,i...->...", mean, q) + bias**2
    scores = (np.sqrt(energies[0].sum(axis=1)) * np.sqrt(energies[1])).sum(axis=1)
    index = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :keep], axis=1)
    rows = len(layer.q[0])
    q = np.take_along_axis(q, index[None, :, None, None], axis=-1).reshape(rows, -1)
    k = np.take_along_axis(k, index[None, :, None], axis=-1).reshape(rows, -1)
    if bias is not None:
        bias = np.take_along_axis(bias, index[:, None, None], axis=-1).reshape(-1)
    return replace(layer, q=(q,), k=(k,), bias_q=bias, pairs=np.take_along_axis(layer.pairs, index, axis=1))


def joined(layer: Layer, C: Floats, keep: int) -> Layer:
    """Keep the largest singular directions of values and outputs of every group."""
    groups = len(layer.pairs)
    values = layer.v[0].astype(np.float64).reshape(len(C), groups, -1)
    outputs = layer.o[0].astype(np.float64).reshape(groups, layer.shared, values.shape[-1], -1)
    roots, vectors = np.linalg.eigh(damped(C))
    root, inverse = ((vectors * roots**power) @ vectors.T for power in (0.5, -0.5))
    new_v, new_o = [], []
    for g in range(groups):
        U, s, right = np.linalg.svd(root @ values[:, g], full_matrices=False)
        joint = (s[:, None] * right) @ outputs[g].transpose(1, 0, 2).reshape(values.shape[-1], -1)
        left, s, right = np.linalg.svd(joint, full_matrices=False)
        new_v.append(inverse @ U @ left[:, :keep])
        new_o.append((s[:keep, None] * right[:keep]).reshape(keep, layer.shared, -1).transpose(1, 0, 2))
    return replace(layer, v=single(np.concatenate(new_v, axis=1)), o=single(np.concatenate(new_o).reshape(-1, len(C))))
