"""Small blocks and views for tests of the numeric code, with statistics computed the naive way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgrail.algebra.moments.gram import Sums
from onnxgrail.core import Array, Block, Bools, Change, Floats, Kind, Probe, Reducer, Role, Slot, Stats, View


def probe_of(units: int, members: int = 1, *, axis: int = 1, pooled: bool = False, value: str = "hidden") -> Probe:
    """A probe that reads u·m channels in order, unit by unit."""
    return Probe(value=value, axis=axis, index=np.arange(units * members).reshape(units, members), pooled=pooled)


def stats_of(rows: Floats) -> Stats:
    """One-shot second moments of (n, h) rows."""
    return Stats(gram=rows.T @ rows, total=rows.sum(axis=0), count=len(rows))


def view_of(
    weights: Sequence[tuple[Role, Any]],
    rows: Sequence[Floats] = (),
    *,
    feeds: Sequence[int] | None = None,
    pooled: Sequence[bool] | None = None,
    kind: Kind = "mlp",
) -> View:
    """A view of a block.

    Args:
        weights: role and (u, m, r) values of each slot.
        rows: calibration rows of each probe, (n, u·m), or (n, u) for a pooled probe; empty for a view without data.
        feeds: probe of each consumer in turn; all 0 by default.
        pooled: which probes are pooled; none by default.
        kind: kind of the block.
    """
    arrays = [np.asarray(w, np.float64) for _, w in weights]
    units, members = arrays[-1].shape[:2]
    pools = list(pooled) if pooled is not None else [False] * max(len(rows), 1)
    consumers = iter(feeds if feeds is not None else [0] * len(weights))
    slots = []
    for i, ((role, _), w) in enumerate(zip(weights, arrays, strict=True)):
        index = np.arange(w.shape[0] * w.shape[1]).reshape(w.shape[:2])
        feed = next(consumers) if role == "consumer" else None
        slots.append(Slot(param=f"w{i}", initializer=f"w{i}", axis=0, index=index, role=role, probe=feed))
    block = Block(
        name="block",
        kind=kind,
        units=units,
        unit_size=members,
        slots=tuple(slots),
        probes=tuple(probe_of(units, members, pooled=p, value=f"hidden{i}") for i, p in enumerate(pools)),
        ids=np.arange(units),
        span=(0, 1),
        nodes=("first", "second"),
    )
    return View(block=block, weights=tuple(arrays), stats=tuple(stats_of(x) for x in rows))


def mlp(rng: np.random.Generator, units: int = 8, members: int = 1, rows: int = 60, outputs: int = 5) -> View:
    """A block with one producer, its bias and one consumer, and correlated positive activations."""
    width = units * members
    x = np.maximum(rng.standard_normal((rows, width)) @ rng.standard_normal((width, width)) + 0.3, 0.0)
    producer = rng.standard_normal((units, members, 4))
    bias = rng.standard_normal((units, members, 1))
    consumer = rng.standard_normal((units, members, outputs))
    view = view_of([("producer", producer), ("passenger", bias), ("consumer", consumer)], [x])
    return replace(view, gradient=np.abs(np.sin(consumer)).sum(axis=(1, 2)) / 100)


def weights_of(change: Change, view: View, slot: int) -> Floats:
    """The narrowed (k, m, r) weights of a slot, changed or merely sliced."""
    return dict(change.weights).get(slot, view.weights[slot][change.reducer.kept])


def gram_of(x: Array, probe: Probe, rows: Bools | None = None) -> Stats:
    """The sums over the rows of one batch."""
    sums = Sums(probe)
    sums.add(x, probe, rows)
    return sums.stats()


def matrix_of(reducer: Reducer, units: int) -> Floats:
    """R (k, u): each row selects a unit or averages a cluster (GRAIL section 3.1, M transposed)."""
    rows = np.zeros((len(reducer.kept), units))
    if reducer.cluster is None:
        rows[np.arange(len(reducer.kept)), reducer.kept] = 1.0
    else:
        rows[reducer.cluster, np.arange(units)] = 1.0
        rows /= rows.sum(axis=1, keepdims=True)
    return rows
