"""Short re-implementations of published methods, ours, after their papers; training is left out everywhere.

Each method is a function of the dense network and its statistics.  It returns plans, and a plan is its parameters and a
function that makes the network, so that only what is chosen gets computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from bench.published import transformer
from bench.published.transformer import Array, Ints, Layer, Net

Floats = npt.NDArray[np.float64]
INPUTS = {"q": "z", "k": "z", "v": "z", "o": "a", "gate": "y", "up": "y", "down": "h"}
STEPS = 500  # ratios that are tried for a number of parameters


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A size that a method can have, and the function that makes it."""

    params: int
    make: Callable[[], Net]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """The dense network, its calibration data, and per layer the second moments and means of inputs by name."""

    net: Net
    inputs: Array | Ints
    moments: tuple[dict[str, Floats], ...]
    means: tuple[dict[str, Floats], ...]
    influence: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Return the number of rows that the moments are means of."""
        return int(np.prod(self.inputs.shape[:2]))


Plans = dict[str, list[Plan]]  # by the choice that the paper leaves open


def measured(net: Net, inputs: Array | Ints) -> Dense:
    """Run the dense network once and collect what the methods read."""
    moments, means, influence = [], [], []
    for _, values in transformer.steps(net, inputs):
        moments.append({name: moment(values[name]) for name in "zayh"})
        means.append({name: flat(values[name]).mean(axis=0) for name in "zah"})
        x, out = flat(values["x"]), flat(values["out"])
        cosine = (x * out).sum(-1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(out, axis=-1))
        influence.append(1 - float(cosine.mean()))
    return Dense(net=net, inputs=inputs, moments=tuple(moments), means=tuple(means), influence=tuple(influence))


def flat(x: Array) -> Floats:
    """Return rows (n, channels)."""
    return x.reshape(-1, x.shape[-1]).astype(np.float64)


def moment(x: Array) -> Floats:
    """Return the mean of products of channels."""
    rows = flat(x)
    return rows.T @ rows / len(rows)


def single(value: Floats) -> tuple[Array]:
    """Return a matrix without factors."""
    return (value.astype(np.float32),)


def damped(G: Floats, share: float = 1e-6) -> Floats:
    """Add a share of the mean diagonal to the diagonal."""
    return G + share * np.trace(G) / len(G) * np.eye(len(G))


# ------------------------------------------------------------------------------------------------------- SliceGPT


def slicegpt(dense: Dense, *, one: bool = False) -> Plans:
    """Rotate the stream to its principal components and slice the last ones (Ashkboos et al. 2024, arXiv 2401.15024).

    Section 3.3: Q of every norm's inputs are the eigenvectors of the sum of XᵀX over normalized signals, computed
    downstream of what is sliced already; the skip of a sub-layer is multiplied by QᵀQ' (equation 10), and these
    matrices count.  `one` takes the same Q everywhere, from the sum over all norms, so that skips need no matrix.
    """
    net = dense.net
    biases = [bias for layer in net.layers for bias in (layer.bias_q, layer.bias_up)]  # that no rotation narrows
    fixed = sum(bias.size for bias in (net.bias_head, *biases) if bias is not None)
    columns = (transformer.parameters(net) - net.others - fixed) // net.channels
    others = net.others - net.norms  # norms have no scales any more
    skips = 0 if one else 2 * len(net.layers)
    sizes = {width: others + fixed + columns * width + skips * width**2 for width in range(1, net.channels + 1)}
    return {
        "": [Plan(params=size, make=partial(sliced, dense, width, others, one=one)) for width, size in sizes.items()]
    }


def sliced(dense: Dense, width: int, others: int, *, one: bool) -> Net:
    """Return the network of that width."""
    net = dense.net
    assert net.head is not None, "the last stream would be an output"
    shared = basis(dense, width) if one else None
    x = transformer.entered(net, dense.inputs)
    E = principal(moment(transformer.normed(net, x)), width) if shared is None else shared
    start = None if net.start is None else net.start @ E
    embedding, x, layers = net.embedding @ E, x @ E, []
    for layer in net.layers:
        read = {name: (E.T @ getattr(layer, name)[0],) for name in "qkv"}
        a = transformer.mixed(net, replace(layer, **read), transformer.normed(net, x))
        mid, skip_o, F = _turn(net, x, transformer.product(a, layer.o, layer.bias_o), E, shared)
        read |= {name: (F.T @ getattr(layer, name)[0],) for name in ("gate", "up") if name in layer.matrices}
        h = transformer.hidden(replace(layer, **read), transformer.normed(net, mid))
        x, skip_down, E2 = _turn(net, mid, transformer.product(h, layer.down, layer.bias_down), F, shared)
        written = {"o": (layer.o[0] @ F,), "down": (layer.down[0] @ E2,)}
        biases = {"bias_o": turned(layer.bias_o, F), "bias_down": turned(layer.bias_down, E2)}
        layers.append(replace(layer, **read, **written, **biases, skip_o=skip_o, skip_down=skip_down))
        E = E2
    changes = {"embedding": embedding, "start": start, "layers": tuple(layers), "head": E.T @ net.head}
    return transformer.widened(net, **changes, others=others)


def turned(bias: Array | None, E: Array) -> Array | None:
    """Return a bias of the stream in the basis E."""
    return None if bias is None else bias @ E


def basis(dense: Dense, width: int) -> Array:
    """Return the columns of one basis for the inputs of all norms."""
    *_, (_, values) = transformer.steps(dense.net, dense.inputs)
    whole = moment(transformer.normed(dense.net, values["out"]))
    for moments in dense.moments:
        whole = whole + moments["z"] + moments["y"]
    return principal(whole, width)


def _turn(net: Net, x: Array, added: Array, E: Array, shared: Array | None) -> tuple[Array, Array | None, Array]:
    """Return the stream after a sub-layer, the matrix of its skip, and the columns of its basis."""
    if shared is not None:
        return x + added @ shared, None, shared
    whole = x @ E.T + added
    F = principal(moment(transformer.normed(net, whole)), E.shape[1])
    return whole @ F, E.T @ F, F


def principal(G: Floats, width: int) -> Array:
    """Return the eigenvectors of the largest eigenvalues as columns."""
    return np.asarray(np.linalg.eigh(G)[1][:, ::-1][:, :width], dtype=np.float32)


# -------------------------------------------------------------------------------------------------------- SVD-LLM


def svd_llm(dense: Dense, *, update: bool = False) -> Plans:
    """Replace every matrix of the layers by two factors (Wang et al. 2024, arXiv 2403.07378).

    Section 3.1: S is the Cholesky factor of the second moment of the inputs, W S = U Σ Vᵀ is truncated, and W becomes
    (U √Σ)(√Σ Vᵀ S⁻¹); all matrices get the same ratio.  `update` fits U in closed form to the inputs that the truncated
    layers upstream give (the local update of the first versions of the paper).
    """
    layers = dense.net.layers
    shapes = {name: getattr(layers[0], name)[0].shape for name in layers[0].matrices}
    fixed = transformer.parameters(dense.net) - len(layers) * sum(m * n for m, n in shapes.values())
    plans = []
    for step in range(1, STEPS + 1):
        ranks = {name: max(1, step * m * n // ((m + n) * STEPS)) for name, (m, n) in shapes.items()}
        size = fixed + len(layers) * sum(ranks[name] * (m + n) for name, (m, n) in shapes.items())
        plans.append(Plan(params=size, make=partial(factored, dense, ranks, update=update)))
    return {"": plans}


def factored(dense: Dense, ranks: dict[str, int], *, update: bool) -> Net:
    """Return the network with factors of those ranks."""
    net, layers, x = dense.net, [], transformer.entered(dense.net, dense.inputs)
    for layer, moments in zip(net.layers, dense.moments, strict=True):
        new = layer
        for part in ("z", "a", "y", "h"):
            names = [name for name in layer.matrices if INPUTS[name] == part]
            values = _part(net, new, x, part) if update else None
            for name in names:
                first, second = whitened(getattr(layer, name)[0].astype(np.float64), moments[part], ranks[name])
                if values is not None:
                    second = fitted(first, moment(values), getattr(layer, name)[0])
                new = replace(new, **{name: (first.astype(np.float32), second.astype(np.float32))})
        layers.append(new)
        a = transformer.mixed(net, new, transformer.normed(net, x))
        mid = transformer.after_heads(net, new, x, a)
        x = transformer.after_mlp(net, new, mid, transformer.hidden(new, transformer.normed(net, mid)))
    return transformer.widened(net, layers=tuple(layers))


def _part(net: Net, layer: Layer, x: Array, part: str) -> Array:
    """Return one of the inputs `z`, `a`, `y`, `h` of a layer for the stream before it."""
    z = transformer.normed(net, x)
    if part == "z":
        return z
    a = transformer.mixed(net, layer, z)
    if part == "a":
        return a
    y = transformer.normed(net, transformer.after_heads(net, layer, x, a))
    return y if part == "y" else transformer.hidden(layer, y)


def whitened(W: Floats, G: Floats, rank: int) -> tuple[Floats, Floats]:
    """Return the factors (in, rank), (rank, out) that lose the least of the outputs of W (in, out)."""
    S = np.linalg.cholesky(damped(G))
    U, s, V = np.linalg.svd(S.T @ W, full_matrices=False)
    root = np.sqrt(s[:rank])
    return np.linalg.solve(S.T, U[:, :rank] * root), root[:, None] * V[:rank]


def fitted(first: Floats, G: Floats, W: Array) -> Floats:
    """Return the second factor that fits the outputs of W for inputs with second moment G."""
    return np.linalg.solve(damped(first.T @ G @ first), first.T @ G @ W)
