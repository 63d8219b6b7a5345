"""Normal equations of a block's consumers, for fitting narrowed weights and computing their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.algebra.fit.row_space import RowSpace, dots
from onnxgrail.algebra.moments.few_rows import rows_of
from onnxgrail.algebra.narrow import mean_rows, sum_rows
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.algebra.solve.ridge import ridge_solve
from onnxgrail.core import BlockError, Bools, Floats, Ints, Probe, Reducer, Slot, Stats, View
from onnxgrail.errors import UsageError

SOME, LEAST = 128, 16  # outputs of all consumers, and of each, that an error is computed from if no weights are needed
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
    """

    gram: Floats
    plain: Floats
    rest: Floats
    lost: Floats
    energy: Floats
    parts: tuple[tuple[int, slice], ...]

    @classmethod
    def of(cls, target: Floats, *, gram: Floats, plain: Floats, energy: Floats, parts: tuple[Any, ...]) -> Normal:
        """Return the problem with the products R G C (h', c) of narrowed features and original outputs."""
        product = linear().product(gram, plain)
        lost = energy + dots(plain, product - 2.0 * target)
        return cls(gram=gram, plain=plain, rest=target - product, lost=lost, energy=energy, parts=parts)

    @property
    def diagonal(self) -> Floats:
        """Return (h',) second moments of the narrowed features."""
        return np.diagonal(self.gram)

    def solution(self, alive: Bools, lam: float) -> tuple[Floats, float, Floats]:
        """Solve the ridge problem for the features that are `alive`: C' = C₀ + (A + λI)⁻¹ (R G C − A C₀ − λ C₀).

        Args:
            alive: (h',) mask of the features that are not silent.
            lam: λ ≥ 0, in units of A.

        Returns:
            C' − C₀ (h', c), 0 for silent features; the λ that was used, see `ridge_solve`; and (c,) the squared errors.
        """
        goal = self.rest - lam * self.plain
        if alive.all():
            step, used = ridge_solve(self.gram, goal, lam)
        else:
            step = np.zeros_like(goal)
            step[alive], used = ridge_solve(self.gram[np.ix_(alive, alive)], goal[alive], lam)
        return step, used, squared_errors(self, step, lam if used == lam else None)


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

    A pooled probe has rows of u values, one for all m positions of the weight: h = u, c = m·r. Else h = u·m, c = r. The
    weight of a grouped convolution has fewer positions than its pooled probe: the same ones in every group.
    """
    units, members, _ = weight.shape
    want = probe.index.shape
    repeated = probe.pooled and members and not want[1] % members
    if units != want[0] or not (members == want[1] or repeated):
        got = units, members
        raise ValueError(f"consumer {slot.param!r} has {got} units and members, its probe {probe.value!r} has {want}")
    return weight.reshape(probe.width, -1)


def normals(view: View, reducer: Reducer, *, brief: bool = False) -> list[Normal | RowSpace]:
    """Compute the normal equations of the narrowed consumers, one per probe that has consumers.

    Args:
        view: the block, with second moments.
        reducer: maps its units.
        brief: take about `SOME` of the outputs, for their errors alone.

    Raises:
        UsageError: the view carries no second moments.
    """
    consumers: dict[int, list[tuple[int, Floats]]] = {}
    for number, slot in enumerate(view.block.slots):
        if slot.role == "consumer":
            place = probe_number(view, slot)
            columns = columns_of(slot, view.weights[number], view.block.probes[place])
            consumers.setdefault(place, []).append((number, columns))
    chosen = {place: _some(parts) if brief else parts for place, parts in consumers.items()}
    return [_normal(view.block.units, view.stats[place], reducer, parts) for place, parts in chosen.items()]


def _some(parts: list[tuple[int, Floats]]) -> list[tuple[int, Floats]]:
    """Return some columns of each consumer, scaled so that their squares stand for all of them."""
    share = SOME / max(sum(part.shape[1] for _, part in parts), 1)
    counts = [max(round(part.shape[1] * share), LEAST) for _, part in parts]
    return [(number, _spread(part, count)) for (number, part), count in zip(parts, counts, strict=True)]


def _spread(columns: Floats, count: int) -> Floats:
    """Return so many columns, evenly spread and scaled; all as they are if there are no more."""
    width = columns.shape[1]
    if count >= width:
        return columns
    some = np.linspace(0, width - 1, count).round().astype(int)
    return np.asarray(columns[:, some] * np.sqrt(width / count))


def _normal(units: int, stats: Stats, reducer: Reducer, parts: list[tuple[int, Floats]]) -> Normal | RowSpace:
    """Compute the normal equations of consumers that share second moments."""
    ends = np.cumsum([0, *(part.shape[1] for _, part in parts)])
    columns = parts[0][1] if len(parts) == 1 else np.concatenate([part for _, part in parts], axis=1)
    numbered = tuple((number, slice(ends[i], ends[i + 1])) for i, (number, _) in enumerate(parts))
    few = rows_of(stats.gram, stats.count) if stats.rows is None else stats.rows
    if few is not None and len(few) <= len(columns):
        return _in_row_space(few, columns, units, reducer, numbered)
    gram = stats.gram if few is None else few.T @ few
    if reducer.cluster is None:
        return _pruned(gram, columns, _features(units, len(columns), reducer), numbered)
    output = linear().product(gram, columns)
    return Normal.of(
        _lifted(output, units, reducer),
        gram=_lifted(np.ascontiguousarray(_lifted(gram, units, reducer).T), units, reducer),
        plain=_unfolded(sum_rows(columns.reshape(units, -1), reducer), columns.shape[1], len(columns) // units),
        energy=dots(columns, output),
        parts=numbered,
    )


def _in_row_space(
    rows: Floats, columns: Floats, units: int, reducer: Reducer, parts: tuple[tuple[int, slice], ...]
) -> RowSpace:
    """Compute the problem of few rows X (r, h): what is made of kept features, and what of dropped ones."""
    columns = columns.astype(rows.dtype, copy=False)
    if reducer.cluster is None:
        kept = _features(units, len(columns), reducer)
        dropped = np.delete(np.arange(len(columns)), kept)
        some, plain = rows.take(kept, axis=1), columns[kept]
        lost = linear().product(rows.take(dropped, axis=1), columns[dropped])
        made = linear().product(some, plain)
        made += lost
    else:
        some = _lifted(rows.T, units, reducer).T
        plain = _unfolded(sum_rows(columns.reshape(units, -1), reducer), columns.shape[1], len(columns) // units)
        made = linear().product(rows, columns)
        lost = made - linear().product(some, plain)
    return RowSpace(rows=some, made=made, plain=plain, lost=dots(lost, lost), parts=parts)


def _pruned(gram: Floats, columns: Floats, kept: Ints, parts: tuple[tuple[int, slice], ...]) -> Normal:
    """Compute the normal equations for a pruning reducer, from blocks of G for kept and dropped features."""
    dropped = np.delete(np.arange(len(gram)), kept)
    columns = columns.astype(gram.dtype, copy=False)
    stays, goes = columns[kept], columns[dropped]
    inner = linear().picked(gram, kept, kept)
    rest = linear().product(linear().picked(gram, kept, dropped), goes)
    lost = _squares(linear().picked(gram, dropped, dropped), goes)
    energy = _squares(inner, stays) + 2.0 * dots(stays, rest) + lost
    return Normal(gram=inner, plain=stays, rest=rest, lost=lost, energy=energy, parts=parts)


def _squares(gram: Floats, columns: Floats) -> Floats:
    """Compute the diagonal (c,) of Cᵀ G C for symmetric G (h, h) and C (h, c), from little more than half of G."""
    half = len(gram) // 2
    if half < HALF:
        return dots(columns, linear().product(gram, columns))
    front, back = slice(None, half), slice(half, None)
    found = 2.0 * dots(columns[back], linear().product(gram[back, front], columns[front]))
    return found + _squares(gram[front, front], columns[front]) + _squares(gram[back, back], columns[back])


def _features(units: int, width: int, reducer: Reducer) -> Ints:
    """Return the indices of the features of the kept units."""
    return np.arange(width).reshape(units, -1)[reducer.kept].ravel()


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
        product = linear().product(normal.gram, step)
        return np.asarray(normal.lost + dots(step, product - 2.0 * normal.rest))
    return np.asarray(normal.lost - dots(step, normal.rest + lam * (normal.plain + step)))


def block_error(systems: Sequence[Normal | RowSpace], after: Sequence[Floats] | None = None) -> BlockError:
    """Compute the squared output errors of all consumers over their squared outputs.

    Args:
        systems: one per probe.
        after: (c,) squared errors of each with compensation, if there is any.

    Returns:
        Errors as shares (0 is perfect), clipped at 0; None if all outputs are zero.
    """
    energy = sum(float(system.energy.sum()) for system in systems)

    def share(errors: Iterable[Floats]) -> float | None:
        error = sum(float(each.sum()) for each in errors)
        return max(error / energy, 0.0) if energy > 0.0 else None

    plain = share(system.lost for system in systems)
    return BlockError(plain=plain, compensated=None if after is None else share(after))
