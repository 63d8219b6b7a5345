"""Normal equations of a block's consumers, for fitting narrowed weights and computing their errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.algebra.moments.few_rows import rows_of
from onnxgrail.algebra.narrow import mean_rows, sum_rows
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.algebra.solve.ridge import ridge_solve
from onnxgrail.core import BlockError, Bools, Floats, Ints, Probe, Reducer, Slot, Stats, View
from onnxgrail.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Normal:
    """The least-squares problem of all consumers of one probe, with their weights side by side as columns C (h, c).

    Attributes:
        gram: A = R G Rᵀ (h', h'), second moments of the narrowed features.
        target: R G C (h', c), their products with the original outputs.
        energy: (c,) diagonal of Cᵀ G C, the squared original outputs.
        plain: (h', c) weights without compensation: kept rows, or cluster sums.
        lost: (c,) squared errors of the plain weights, None if not computed.
        parts: slot number and columns of each consumer.
        rows: X Rᵀ (r, h') and X C (r, c) if G = XᵀX for few rows X, else None.
    """

    gram: Floats
    target: Floats
    energy: Floats
    plain: Floats
    parts: tuple[tuple[int, slice], ...]
    lost: Floats | None = None
    rows: tuple[Floats, Floats] | None = None

    def product(self, weights: Floats) -> Floats:
        """Compute A C' for weights C' (h', c)."""
        if self.rows is None:
            return linear().product(self.gram, weights)
        some, _ = self.rows
        return linear().product(some.T, linear().product(some, weights))

    def solution(self, alive: Bools, lam: float) -> tuple[Floats, float]:
        """Solve the ridge problem for the features that are `alive`.

        With few rows the solution is X'ᵀ (X' X'ᵀ + λI)⁻¹ X C, which is equal by the push-through identity.

        Args:
            alive: (h',) mask of the features that are not silent.
            lam: λ ≥ 0, in units of A.

        Returns:
            The weights and the λ that was used, see `ridge_solve`.
        """
        if self.rows is not None:
            some, made = self.rows
            some = some[:, alive]
            found, used = ridge_solve(linear().product(some, some.T), made, lam)
            return linear().product(some.T, found), used
        if alive.all():
            return ridge_solve(self.gram, self.target, lam)
        return ridge_solve(self.gram[np.ix_(alive, alive)], self.target[alive], lam)


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
    for number, (slot, weight) in enumerate(zip(view.block.slots, view.weights, strict=True)):
        if slot.role == "consumer":
            place = probe_number(view, slot)
            columns = columns_of(slot, weight, view.block.probes[place])
            consumers.setdefault(place, []).append((number, columns))
    return [_normal(view.block.units, view.stats[place], reducer, parts) for place, parts in consumers.items()]


def _normal(units: int, stats: Stats, reducer: Reducer, parts: list[tuple[int, Floats]]) -> Normal:
    """Compute the normal equations of consumers that share second moments."""
    ends = np.cumsum([0, *(part.shape[1] for _, part in parts)])
    columns = np.concatenate([part for _, part in parts], axis=1)
    few = rows_of(stats.gram, stats.count)
    if few is None and reducer.cluster is None:
        sums = _pruned(stats.gram, columns, _features(units, len(columns), reducer))
    else:
        sums = _narrowed(stats.gram, few, columns, units, reducer)
    return Normal(**sums, parts=tuple((number, slice(ends[i], ends[i + 1])) for i, (number, _) in enumerate(parts)))


def _pruned(gram: Floats, columns: Floats, kept: Ints) -> dict[str, Any]:
    """Compute the sums for a pruning reducer. G is split into blocks of kept and dropped features to save products."""
    dropped = np.delete(np.arange(len(gram)), kept)
    stays, goes = columns[kept], columns[dropped]
    inner = linear().picked(gram, kept, kept)
    across = linear().product(linear().picked(gram, kept, dropped), goes)
    target = linear().product(inner, stays)
    target += across
    lost = _dots(goes, linear().product(linear().picked(gram, dropped, dropped), goes))
    energy = _dots(stays, target) + _dots(stays, across) + lost
    return {"gram": inner, "target": target, "energy": energy, "plain": stays, "lost": lost}


def _narrowed(gram: Floats, few: Floats | None, columns: Floats, units: int, reducer: Reducer) -> dict[str, Any]:
    """Compute the sums for any reducer, from G or from `few` rows X with G = XᵀX."""
    rows = None
    if few is None:
        output = linear().product(gram, columns)
    else:
        made = linear().product(few, columns)
        output, rows = linear().product(few.T, made), (_lifted(few.T, units, reducer).T, made)
    return {
        "gram": _both_sides(gram, units, reducer),
        "target": _lifted(output, units, reducer),
        "energy": _dots(columns, output),
        "plain": _unfolded(sum_rows(columns.reshape(units, -1), reducer), columns.shape[1], len(columns) // units),
        "rows": rows,
    }


def _dots(left: Floats, right: Floats) -> Floats:
    """Compute the dot products of corresponding columns."""
    return np.asarray(np.einsum("hc,hc->c", left, right))


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


def squared_errors(normal: Normal, weights: Floats, product: Floats | None = None) -> Floats:
    """Compute the squared output error of each column: diag(Cᵀ G C − 2 C'ᵀ R G C + C'ᵀ R G Rᵀ C').

    Args:
        normal: the equations.
        weights: C' (h', c).
        product: A C', if it is known already.

    Returns:
        (c,) sums over calibration rows, in squared output units; rounding may leave tiny negative values.
    """
    if product is None:
        product = normal.product(weights)
    return np.asarray(normal.energy + _dots(weights, product - 2.0 * normal.target))


def plain_errors(normal: Normal) -> Floats:
    """Return the squared output error of each column without compensation."""
    return squared_errors(normal, normal.plain) if normal.lost is None else normal.lost


def block_error(systems: list[Normal], compensated: list[Floats] | None = None) -> BlockError:
    """Compute the squared output errors of all consumers over their squared outputs.

    Args:
        systems: one per probe.
        compensated: compensated weights (h', c) for each, if there are any.

    Returns:
        Errors as shares (0 is perfect), clipped at 0; None if all outputs are zero.
    """
    energy = sum(float(system.energy.sum()) for system in systems)

    def share(errors: Iterable[Floats]) -> float | None:
        error = sum(float(each.sum()) for each in errors)
        return max(error / energy, 0.0) if energy > 0.0 else None

    plain = share(map(plain_errors, systems))
    return BlockError(
        plain=plain, compensated=None if compensated is None else share(map(squared_errors, systems, compensated))
    )
