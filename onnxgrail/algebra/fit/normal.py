"""Normal equations of a block's consumers, for fitting narrowed weights and computing their errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxgrail.algebra.moments.few_rows import rows_of
from onnxgrail.algebra.narrow import mean_rows, sum_rows
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.algebra.solve.ridge import ridge_solve
from onnxgrail.core import BlockError, Bools, Floats, Ints, Probe, Reducer, Slot, Stats, View
from onnxgrail.errors import UsageError

HALF = 512  # rows of half a symmetric matrix from which its halves are multiplied apart


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Normal:
    """The least-squares problem of all consumers of one probe, with their weights side by side as columns C (h, c).

    Sums and weights are float32 if the second moments are.

    Attributes:
        gram: A = R G Rᵀ (h', h'), second moments of the narrowed features.
        plain: C₀ (h', c) weights without compensation: kept rows, or cluster sums.
        rest: R G C − A C₀ (h', c), products of the narrowed features with what the outputs lose.
        lost: (c,) squares of what the outputs lose: the errors of the plain weights.
        energy: (c,) diagonal of Cᵀ G C, the squared original outputs.
        parts: slot number and columns of each consumer.
        rows: X Rᵀ (r, h') and X C (r, c) if G = XᵀX for few rows X, else None.
    """

    gram: Floats
    plain: Floats
    rest: Floats
    lost: Floats
    energy: Floats
    parts: tuple[tuple[int, slice], ...]
    rows: tuple[Floats, Floats] | None = None

    @classmethod
    def of(cls, target: Floats, *, plain: Floats, energy: Floats, **others: Any) -> Normal:
        """Return the problem with the products R G C (h', c) of narrowed features and original outputs."""
        empty = cls(plain=plain, rest=target, lost=energy, energy=energy, **others)
        product = empty.product(plain)
        return replace(empty, rest=target - product, lost=energy + _dots(plain, product - 2.0 * target))

    def product(self, weights: Floats) -> Floats:
        """Compute A D for weights D (h', c)."""
        if self.rows is None:
            return linear().product(self.gram, weights)
        some, _ = self.rows
        return linear().product(some.T, linear().product(some, weights))

    def solution(self, alive: Bools, lam: float) -> tuple[Floats, float]:
        """Solve the ridge problem for the features that are `alive`: C' = C₀ + (A + λI)⁻¹ (R G C − A C₀ − λ C₀).

        With few rows it is C' = X'ᵀ (X' X'ᵀ + λI)⁻¹ X C, which is equal by the push-through identity.

        Args:
            alive: (h',) mask of the features that are not silent.
            lam: λ ≥ 0, in units of A.

        Returns:
            C' − C₀ for these features, and the λ that was used, see `ridge_solve`.
        """
        if self.rows is not None:
            some, made = self.rows
            some = some[:, alive]
            found, used = ridge_solve(linear().product(some, some.T), made, lam)
            return linear().product(some.T, found) - self.plain[alive], used
        goal = self.rest - lam * self.plain
        if alive.all():
            return ridge_solve(self.gram, goal, lam)
        return ridge_solve(self.gram[np.ix_(alive, alive)], goal[alive], lam)


def probe_number(view: View, slot: Slot) -> int:
    """Return the number of the probe, and of its second moments, that belongs to a consumer.

    Raises:
        UsageError: the view carries no second moments.
    """
    if not view.stats:
        raise UsageError(
            f"block {view.block.name!r} has no activation statistics",
            hint="Give calibration data, or choose a selector and a compensation that need none (l2, none).",
        )
    if slot.probe is None:
        raise ValueError(f"consumer {slot.param!r} of block {view.block.name!r} names no probe")
    return slot.probe


def columns_of(slot: Slot, weight: Floats, probe: Probe) -> Floats:
    """Reshape a consumer's weight (u, m, r) to the matrix C (h, c) that multiplies one row of the probe.

    A pooled probe has rows of u values, one for all m positions of the weight: h = u, c = m·r. Else h = u·m, c = r.
    """
    units, members, _ = weight.shape
    if (units, members) != probe.index.shape:
        got, want = (units, members), probe.index.shape
        raise ValueError(f"consumer {slot.param!r} has {got} units and members, its probe {probe.value!r} has {want}")
    return weight.reshape(probe.width, -1)


def normals(view: View, reducer: Reducer) -> list[Normal]:
    """Compute the normal equations of the narrowed consumers, one per probe that has consumers.

    Raises:
        UsageError: the view carries no second moments.
    """
    consumers: dict[int, list[tuple[int, Floats]]] = {}
    for number, slot in enumerate(view.block.slots):
        if slot.role == "consumer":
            place = probe_number(view, slot)
            columns = columns_of(slot, view.weights[number], view.block.probes[place])
            consumers.setdefault(place, []).append((number, columns))
    return [_normal(view.block.units, view.stats[place], reducer, parts) for place, parts in consumers.items()]


def _normal(units: int, stats: Stats, reducer: Reducer, parts: list[tuple[int, Floats]]) -> Normal:
    """Compute the normal equations of consumers that share second moments."""
    ends = np.cumsum([0, *(part.shape[1] for _, part in parts)])
    columns = parts[0][1] if len(parts) == 1 else np.concatenate([part for _, part in parts], axis=1)
    numbered = tuple((number, slice(ends[i], ends[i + 1])) for i, (number, _) in enumerate(parts))
    few = rows_of(stats.gram, stats.count)
    if few is None and reducer.cluster is None:
        return _pruned(stats.gram, columns, _features(units, len(columns), reducer), numbered)
    rows = None
    if few is None:
        output = linear().product(stats.gram, columns)
    else:
        made = linear().product(few, columns)
        output, rows = linear().product(few.T, made), (_lifted(few.T, units, reducer).T, made)
    return Normal.of(
        _lifted(output, units, reducer),
        gram=_both_sides(stats.gram, units, reducer),
        plain=_unfolded(sum_rows(columns.reshape(units, -1), reducer), columns.shape[1], len(columns) // units),
        energy=_dots(columns, output),
        parts=numbered,
        rows=rows,
    )


def _pruned(gram: Floats, columns: Floats, kept: Ints, parts: tuple[tuple[int, slice], ...]) -> Normal:
    """Compute the normal equations for a pruning reducer, from blocks of G for kept and dropped features."""
    dropped = np.delete(np.arange(len(gram)), kept)
    columns = columns.astype(gram.dtype, copy=False)
    stays, goes = columns[kept], columns[dropped]
    inner = linear().picked(gram, kept, kept)
    rest = linear().product(linear().picked(gram, kept, dropped), goes)
    lost = _squares(linear().picked(gram, dropped, dropped), goes)
    energy = _squares(inner, stays) + 2.0 * _dots(stays, rest) + lost
    return Normal(gram=inner, plain=stays, rest=rest, lost=lost, energy=energy, parts=parts)


def _squares(gram: Floats, columns: Floats) -> Floats:
    """Compute the diagonal (c,) of Cᵀ G C for symmetric G (h, h) and C (h, c), from little more than half of G."""
    half = len(gram) // 2
    if half < HALF:
        return _dots(columns, linear().product(gram, columns))
    front, back = slice(None, half), slice(half, None)
    found = 2.0 * _dots(columns[back], linear().product(gram[back, front], columns[front]))
    return found + _squares(gram[front, front], columns[front]) + _squares(gram[back, back], columns[back])


def _dots(left: Floats, right: Floats) -> Floats:
    """Compute the dot products of corresponding columns, in float64."""
    return np.asarray(np.einsum("hc,hc->c", left, right, dtype=np.float64))


def _features(units: int, width: int, reducer: Reducer) -> Ints:
    """Return the indices of the features of the kept units."""
    return np.arange(width).reshape(units, -1)[reducer.kept].ravel()


def _both_sides(gram: Floats, units: int, reducer: Reducer) -> Floats:
    """Compute (R ⊗ I) G (R ⊗ I)ᵀ; by indexing if units are only dropped."""
    if reducer.cluster is None:
        features = _features(units, len(gram), reducer)
        return linear().picked(gram, features, features)
    half = _lifted(gram, units, reducer)
    return _lifted(np.ascontiguousarray(half.T), units, reducer)


def _lifted(features: Floats, units: int, reducer: Reducer) -> Floats:
    """Compute (R ⊗ I) V for V (h, c); features are in unit-major order."""
    return _unfolded(mean_rows(features.reshape(units, -1), reducer), features.shape[1], len(features) // units)


def _unfolded(kept: Floats, columns: int, members: int) -> Floats:
    """Reshape (units, members * columns) to (units * members, columns), also if there are no columns."""
    return np.asarray(kept).reshape(len(kept) * members, columns)


def squared_errors(normal: Normal, step: Floats, lam: float | None = None) -> Floats:
    """Compute the squared output errors of the weights C₀ + D, per column: those of C₀, − 2 Dᵀ (R G C − A C₀) + Dᵀ A D.

    Args:
        normal: the equations.
        step: D (h', c).
        lam: λ if D is the exact solution for it; then A D = R G C − A C₀ − λ (C₀ + D) needs no product.

    Returns:
        (c,) sums over calibration rows, in squared output units; rounding may leave tiny negative values.
    """
    if lam is None:
        return np.asarray(normal.lost + _dots(step, normal.product(step) - 2.0 * normal.rest))
    return np.asarray(normal.lost - _dots(step, normal.rest + lam * (normal.plain + step)))


def block_error(systems: list[Normal], steps: list[Floats] | None = None) -> BlockError:
    """Compute the squared output errors of all consumers over their squared outputs.

    Args:
        systems: one per probe.
        steps: change of the weights (h', c) by compensation for each, if there is any.

    Returns:
        Errors as shares (0 is perfect), clipped at 0; None if all outputs are zero.
    """
    energy = sum(float(system.energy.sum()) for system in systems)

    def share(errors: Iterable[Floats]) -> float | None:
        error = sum(float(each.sum()) for each in errors)
        return max(error / energy, 0.0) if energy > 0.0 else None

    plain = share(system.lost for system in systems)
    return BlockError(plain=plain, compensated=None if steps is None else share(map(squared_errors, systems, steps)))
