"""GRAIL as the formulas of the paper read, dense and slow: the oracle that the streamed implementation is held against.

Closed loop re-runs the whole narrowed network for every block, on all samples at once; G = XᵀX in one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .nets import HEAD, Arrays

Run = Callable[[Arrays, Arrays], Arrays]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One block, written down by hand.

    Attributes:
        units: how many there are.
        producers, passengers, consumers: (weight, axis of the channels).
        tap: activation that feeds the consumers; `pixels` (n, c, h, w), `flat` (n, c·h·w) or `features` (..., c).
    """

    units: int
    producers: Sequence[tuple[str, int]]
    passengers: Sequence[tuple[str, int]] = ()
    consumers: Sequence[tuple[str, int]]
    tap: str
    kind: str = "features"


def grail(
    weights: Arrays,
    parts: Sequence[Part],
    run: Run,
    feed: Arrays,
    *,
    unit_ratio: float,
    closed: bool,
    alpha: float = 1e-3,
    selector: str = "wanda",
    clusters: Sequence[Any] | None = None,
    compensate: bool = True,
) -> Arrays:
    """Weights after narrowing the parts in the order given; `clusters`, one array per part, folds instead."""
    now = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in weights.items()}
    dense = run(now, feed)
    for number, part in enumerate(parts):
        taps = run(now, feed) if closed else dense
        X = rows(taps[part.tap], part, feed.get("attention_mask"))
        G = X.T @ X
        assert np.diag(G).min() > 1e-6 * np.diag(G).mean(), (
            "a silent channel: the formula does not say what becomes of it"
        )
        if clusters is None:
            R = selection(now, part, G, len(X), unit_ratio, selector)
        else:
            R = np.eye(max(clusters[number]) + 1)[:, clusters[number]]
            R /= R.sum(axis=1, keepdims=True)
        narrow(now, part, R, G, alpha, compensate=compensate)
    return now


def rows(tap: Any, part: Part, mask: Any = None) -> Any:
    """Calibration rows X (n, h); padded tokens are dropped before anything is summed."""
    if part.kind == "pixels":
        return np.moveaxis(tap, 1, -1).reshape(-1, tap.shape[1])
    if part.kind == "flat":
        return np.moveaxis(tap.reshape(len(tap), part.units, -1), 1, -1).reshape(-1, part.units)
    return tap.reshape(-1, tap.shape[-1]) if mask is None else tap[mask == 1]


def selection(weights: Arrays, part: Part, G: Any, count: int, ratio: float, selector: str) -> Any:
    """R (k, u) of the units with the highest score."""
    if selector == "wanda":
        score = 0.0
        for name, axis in part.consumers:
            C = columns(weights[name], axis, len(G))
            score = score + (np.abs(C).sum(axis=1) * np.sqrt(np.diag(G) / count)).reshape(part.units, -1).sum(axis=1)
    else:
        squares = [columns(weights[n], axis, part.units) ** 2 for n, axis in part.producers]
        score = np.sqrt(sum(s.sum(axis=1) for s in squares))
    keep = part.units - int(np.floor(part.units * ratio + 0.5))
    return np.eye(part.units)[np.sort(np.argsort(-score)[:keep])]


def narrow(weights: Arrays, part: Part, R: Any, G: Any, alpha: float, *, compensate: bool = True) -> None:
    """Producers and passengers follow R, consumers become Bᵀ C with B = G Rᵀ (R G Rᵀ + λI)⁻¹; in place."""
    for name, axis in (*part.producers, *part.passengers):
        weights[name] = replace(weights[name], axis, R @ columns(weights[name], axis, part.units), len(R))
    M = np.kron(R, np.eye(len(G) // part.units))
    A = M @ G @ M.T
    ridge = alpha * np.mean(np.diag(A))
    B = np.linalg.solve(A + ridge * np.eye(len(A)), M @ G).T if compensate else (M > 0).T.astype(float)
    for name, axis in part.consumers:
        weights[name] = replace(weights[name], axis, B.T @ columns(weights[name], axis, len(G)), len(R))


def columns(weight: Any, axis: int, height: int) -> Any:
    """A weight as (height, everything else), the channel axis in front."""
    return np.moveaxis(weight, axis, 0).reshape(height, -1)


def replace(weight: Any, axis: int, values: Any, kept: int) -> Any:
    """`values` in the layout of a weight of which `kept` units are left."""
    others = np.delete(weight.shape, axis)
    return np.moveaxis(values.reshape(-1, *others), 0, axis)


# ------------------------------------------------------------------------------------------- the nets, block by block


def mlp_parts(widths: Sequence[int]) -> list[Part]:
    """Hidden layers of `nets.mlp`; the even layers hold their weight as outputs by inputs."""
    return [
        Part(
            units=width,
            producers=[(f"w{k}", 0 if k % 2 == 0 else 1)],
            passengers=[(f"b{k}", 0)],
            consumers=[(f"w{k + 1}", 1 if k % 2 else 0)],
            tap=f"h{k}",
        )
        for k, width in enumerate(widths[1:-1])
    ]


CONVNET = [
    Part(units=16, producers=[("a", 0)], passengers=[("a_bias", 0)], consumers=[("b", 1)], tap="ha", kind="pixels"),
    Part(units=12, producers=[("c", 0)], passengers=[("c_bias", 0)], consumers=[("head", 0)], tap="flat", kind="flat"),
]


def transformer_parts(width: int = 32, hidden: int = 48) -> list[Part]:
    """Attention before the MLP of the same layer."""
    parts = []
    for k in range(2):
        gates = [(f"gate{k}", 1)] if k else []
        parts += [
            Part(
                units=width // HEAD,
                producers=[(f"{n}{k}", 1) for n in "qkv"],
                passengers=[(f"{n}{k}_bias", 0) for n in "qkv"],
                consumers=[(f"o{k}", 0)],
                tap=f"a{k}",
            ),
            Part(
                units=hidden,
                producers=[*gates, (f"up{k}", 1)],
                passengers=[(f"up{k}_bias", 0)],
                consumers=[(f"down{k}", 0)],
                tap=f"h{k}",
            ),
        ]
    return parts
