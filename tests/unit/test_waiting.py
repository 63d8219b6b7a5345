"""Rows of small batches wait until their product is fast."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.moments import gram, waiting
from onnxgrail.algebra.moments.cross import Pairs
from onnxgrail.algebra.moments.gram import Sums
from onnxgrail.algebra.moments.triangles import add_squares
from onnxgrail.algebra.moments.waiting import Waiting
from onnxgrail.core import Array, Probe


def batches(*shape: int, count: int = 7) -> list[Array]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(count)]


@pytest.mark.parametrize("thick", [1, 8, 12, 1000])
def test_no_row_is_lost_and_their_order_stays(thick: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "THICK", thick)
    rows, waits = batches(4, 3), Waiting()
    ready = [waits.add(x, -x) for x in rows]
    assert all(not pair or len(pair[0]) >= thick for pair in ready)
    found = [pair for pair in (*ready, waits.all()) if pair]
    np.testing.assert_array_equal(np.concatenate([pair[0] for pair in found]), np.concatenate(rows))
    np.testing.assert_array_equal(np.concatenate([pair[1] for pair in found]), -np.concatenate(rows))
    assert waits.all() == ()


def test_small_batches_are_multiplied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(triangle: Array | None, rows: Array) -> Array:
        seen.append(len(rows))
        return add_squares(triangle, rows)

    monkeypatch.setattr(waiting, "THICK", 12)
    monkeypatch.setattr(gram, "add_squares", counted)
    probe = Probe(value="x", axis=1, index=np.arange(3)[:, None], pooled=False)
    sums, rows = Sums(probe), batches(5, 3)
    for x in rows:
        sums.add(x, probe)
    everything = np.concatenate(rows).astype(np.float64)
    np.testing.assert_allclose(sums.stats().gram, everything.T @ everything, rtol=1e-5)
    assert seen == [15, 15, 5]


@pytest.mark.parametrize("through", [False, True])
def test_products_for_a_fit_do_not_depend_on_the_size_of_batches(
    through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "THICK", 12)
    z, t, x = batches(5, 3), batches(5, 2), batches(5, 4)
    pairs = Pairs(3, 2)
    for some in zip(z, t, x, strict=True):
        pairs.add(*(some if through else some[:2]))
    triangle, cross, z_total, x_total, energy, count = pairs.drain()
    Z, T, X = (np.concatenate(rows).astype(np.float64) for rows in (z, t, x if through else t))
    np.testing.assert_allclose(np.tril(triangle.reshape(3, 3)), np.tril(Z.T @ Z), rtol=1e-5)
    np.testing.assert_allclose(cross.reshape(3, -1), Z.T @ X, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(z_total, Z.sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(x_total, X.sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(energy, np.square(T).sum(0), rtol=1e-5)
    assert count == [35]
    assert pairs.drain()[0].size == 0
