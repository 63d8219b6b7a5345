"""Fits one scale and one shift per channel, so that activations of a narrowed network match the dense network's.

Notation: y (n, k) are activations of the narrowed network, t (n, c) those of the dense network, and `pool` (c,) is the
index of the narrowed channel that represents each dense channel: its own if it is kept, its cluster's if it was folded,
-1 if it was pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.core import Array, Bools, Change, Floats, Ints

ALPHAS = (1e-4, 1e-2, 1e-1, 1.0)
DEAD = 1e-3  # a deviation below this share of its target is not scaled up
FLAT = 1e-6  # share of the layer's largest deviation below which a channel counts as constant


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over rows, per channel.

    Attributes:
        count: number of rows.
        y, yy: of the narrowed network's channels and of their squares (k,).
        t, tt, yt: of the mean of the dense channels that each channel represents, its squares, its products with y
            (k,).
        own, square: of the dense network's channels and of their squares (c,).
    """

    count: int
    y: Floats
    yy: Floats
    t: Floats
    tt: Floats
    yt: Floats
    own: Floats
    square: Floats

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over both sets of rows."""
        names = ("y", "yy", "t", "tt", "yt", "own", "square")
        return Sums(self.count + other.count, *(getattr(self, n) + getattr(other, n) for n in names))


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """The map y -> scale * y + shift, (k,) each."""

    scale: Floats
    shift: Floats


def zero_sums(k: int, c: int) -> Sums:
    """Return the sums over zero rows, for k narrowed and c dense channels."""
    return Sums(0, *(np.zeros(k) for _ in range(5)), *(np.zeros(c) for _ in range(2)))


def sums(y: Array, t: Array, pool: Ints) -> Sums:
    """Compute the sums over rows of y (n, k) and t (n, c), in float64."""
    mean = pooled(t, pool, y.shape[1])

    def dot(a: Array, b: Array) -> Floats:
        return np.asarray(np.einsum("nk,nk->k", a, b, dtype=np.float64))

    def total(a: Array) -> Floats:
        return np.asarray(a.sum(axis=0, dtype=np.float64))

    return Sums(len(y), total(y), dot(y, y), total(mean), dot(mean, mean), dot(y, mean), total(t), dot(t, t))


def twins(count: int, changes: Iterable[Change]) -> Ints:
    """Return (ids,) the unit that represents each unit: itself, or the representative of its cluster."""
    found = np.arange(count)
    for change in changes:
        if change.reducer.cluster is not None:
            found[change.block.ids] = change.block.ids[change.reducer.kept[change.reducer.cluster]]
    return found


def pool_of(labels: Ints, dead: Bools, stand: Ints) -> Ints:
    """Return (c,) the index of the kept channel that represents each channel of an axis, -1 if none does.

    Of several positions with one label the first represents the first, and so on.

    Args:
        labels: (c,) the unit of every channel.
        dead: (ids,) mask of removed units.
        stand: (ids,) the unit that represents each unit.
    """
    kept: dict[tuple[int, int], int] = {}
    turns: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for label in labels.tolist():
        turns[label] = turns.get(label, -1) + 1
        places.append((label, turns[label]))
        if not dead[label]:
            kept[places[-1]] = len(kept)
    return np.array([kept.get((int(stand[label]), turn), -1) for label, turn in places], dtype=np.int64)


def pooled(t: Array, pool: Ints, k: int) -> Array:
    """Average the channels that each narrowed channel represents: (..., c) -> (..., k)."""
    members = np.flatnonzero(pool >= 0)
    if len(members) == k:
        return t[..., members[np.argsort(pool[members], kind="stable")]]
    average = np.zeros((t.shape[-1], k), dtype=t.dtype)
    average[members, pool[members]] = 1.0
    return np.asarray(t @ (average / average.sum(axis=0, dtype=np.float64)).astype(t.dtype))


def narrowed(array: Array, axis: int, labels: Ints, dead: Bools, stand: Ints) -> Array:
    """Narrow a dense tensor to the kept channels of an axis; channels joined by a fold are averaged.

    Args:
        array: c channels on `axis`; k of them stay.
        axis: the channel axis.
        labels: (c,) the unit of every channel.
        dead: (ids,) mask of removed units.
        stand: (ids,) the unit that represents each unit.
    """
    pool = pool_of(labels, dead, stand)
    return np.moveaxis(pooled(np.moveaxis(array, axis, -1), pool, int(pool.max()) + 1), -1, axis)


def repair(found: Sums, pool: Ints) -> Affine:
    """Match mean and standard deviation of each of the k channels with the dense network.

    A channel that represents several channels aims at the mean of their means and the mean of their deviations. This is
    more than the deviation of their mean: averaging makes activations collapse. Channels that are constant in either
    network are not changed.

    Args:
        found: sums over rows.
        pool: (c,) see `pool_of`.

    References:
        Jordan et al. 2023, REPAIR, arXiv:2211.08403, section 4.
    """
    mean, deviation = _spread(found.y, found.yy, found.count)
    goals = [pooled(a, pool, len(mean)) for a in _spread(found.own, found.square, found.count)]
    flat = FLAT * max(float(goals[1].max(initial=0.0)), float(deviation.max(initial=0.0)))
    alive = (deviation > flat) & (goals[1] > flat) & (deviation > DEAD * goals[1])
    scale = np.divide(goals[1], deviation, out=np.ones_like(mean), where=alive)
    return Affine(scale, np.where(alive, goals[0] - scale * mean, 0.0))


def refit(fit: Sums, held: Sums, *, shifts: bool, alphas: Sequence[float] = ALPHAS) -> Affine | None:
    """Fit scale and shift per channel to the dense network; held-out rows choose the ridge parameter.

    The ridge pulls scales towards one, their present value.

    Args:
        fit: sums over the rows that are fitted.
        held: sums over held-out rows.
        shifts: True if there is a bias that can change; otherwise shifts are zero.
        alphas: ridge parameters to try, as shares of the channels' mean second moment.

    Returns:
        None if no ridge lowers the held-out error.
    """
    k = len(fit.y)
    stay = Affine(np.ones(k), np.zeros(k))
    tried = [_solved(fit, alpha, shifts=shifts) for alpha in alphas] if fit.count and held.count else []
    best = min([stay, *tried], key=lambda a: error(held, a))
    return None if best is stay else best


def error(found: Sums, affine: Affine) -> float:
    """Compute the sum of squared errors of t ~ scale * y + shift over all rows and channels; never negative."""
    s, c = affine.scale, affine.shift
    squares = s * s * found.yy + 2 * s * c * found.y + c * c * found.count
    return max(float((squares - 2 * (s * found.yt + c * found.t) + found.tt).sum()), 0.0)


def distance(found: Sums) -> float:
    """Compute the sum of squared errors without a change."""
    return error(found, Affine(np.ones_like(found.y), np.zeros_like(found.y)))


def moved(found: Sums, affine: Affine) -> float:
    """Compute the sum of squares of the change that an affine map makes."""
    s, c = affine.scale - 1.0, affine.shift
    return max(float((s * s * found.yy + 2 * s * c * found.y + c * c * found.count).sum()), 0.0)


def _solved(fit: Sums, alpha: float, *, shifts: bool) -> Affine:
    """Solve least squares per channel with a ridge towards scale one; constant channels keep their scale."""
    mean_y, mean_t = (a / fit.count if shifts else np.zeros_like(a) for a in (fit.y, fit.t))
    moment = np.maximum(fit.yy / fit.count - mean_y**2, 0.0)
    product = fit.yt / fit.count - mean_y * mean_t
    ridge = alpha * float(moment.mean())
    alive = moment > FLAT * float(moment.max(initial=0.0))
    scale = np.divide(product + ridge, moment + ridge, out=np.ones_like(moment), where=alive)
    return Affine(scale, mean_t - scale * mean_y)


def _spread(total: Floats, square: Floats, count: int) -> tuple[Floats, Floats]:
    """Compute mean and standard deviation from sums."""
    mean = total / max(count, 1)
    return mean, np.sqrt(np.maximum(square / max(count, 1) - mean**2, 0.0))
