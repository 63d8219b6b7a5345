"""Second moments against one-shot products, for every layout a probe can have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.moments.gram import Squares, Sums
from onnxgrail.core import Array, Probe, Stats
from onnxgrail.errors import DataError
from tests.unit.algebra_builders import gram_of, probe_of


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


TOLERANCE: dict[Any, float] = {np.float64: 1e-12, np.float32: 1e-5, np.float16: 1e-5}


def naive(x: Array, probe: Probe, rows: Array | None = None) -> Stats:
    """Gather, flatten, multiply: float64 throughout, one row at a time."""
    last = np.moveaxis(x.astype(np.float64), probe.axis, -1)
    last = last.reshape(-1, last.shape[-1])
    if rows is not None:
        last = last[rows.ravel()]
    if probe.pooled:
        flat = np.array([row[probe.index[:, j]] for row in last for j in range(probe.index.shape[1])])
    else:
        flat = last[:, probe.index.ravel()]
    flat = flat.reshape(-1, probe.width)
    return Stats(gram=flat.T @ flat, total=flat.sum(axis=0), count=len(flat))


def check(got: Stats, want: Stats, tolerance: float = 1e-12) -> None:
    scale = max(np.abs(want.gram).max(initial=0.0), 1e-300)
    assert got.count == want.count
    assert got.gram.dtype == np.float64
    assert got.total.dtype == np.float64
    assert np.array_equal(got.gram, got.gram.T)
    assert np.abs(got.gram - want.gram).max() <= tolerance * scale
    np.testing.assert_allclose(got.total, want.total, rtol=0, atol=tolerance * max(want.count, 1) * np.sqrt(scale))


LAYOUTS = {
    "rows": ((7, 6), probe_of(6)),
    "tokens": ((2, 5, 6), probe_of(6, axis=2)),
    "heads": ((2, 5, 6), probe_of(3, 2, axis=2)),
    "wide image": ((3, 4, 3, 2), probe_of(4, axis=1)),  # HW >= C: sample by sample
    "deep image": ((3, 8, 2, 2), probe_of(8, axis=1)),  # HW < C: one transposed copy
    "channels in front": ((6, 2, 3), probe_of(6, axis=0)),
    "flattened map, many positions": ((4, 12), probe_of(3, 4, pooled=True)),
    "flattened map, few positions": ((4, 12), probe_of(6, 2, pooled=True)),
    "heads over an image": ((2, 6, 2, 2), probe_of(3, 2, axis=1)),
    "pooled with trailing axes": ((2, 6, 2, 2), probe_of(3, 2, axis=1, pooled=True)),
    "some channels": ((2, 5, 9), Probe(value="x", axis=2, index=np.array([[7, 1], [4, 0], [2, 8]]), pooled=False)),
    "some channels pooled": ((4, 9), Probe(value="x", axis=1, index=np.array([[7, 1], [4, 0], [2, 8]]), pooled=True)),
    "some channels of an image": ((2, 9, 2, 2), Probe(value="x", axis=1, index=np.array([[8], [0]]), pooled=False)),
    "first channels only": ((4, 9), probe_of(5)),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_naive_product(layout: str, dtype: Any, rng: np.random.Generator) -> None:
    shape, probe = LAYOUTS[layout]
    x = (rng.standard_normal(shape) + 0.5).astype(dtype)
    check(gram_of(x, probe), naive(x, probe), TOLERANCE[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_leaves_rows_out(layout: str, rng: np.random.Generator) -> None:
    shape, probe = LAYOUTS[layout]
    x = rng.standard_normal(shape)
    others = tuple(n for i, n in enumerate(shape) if i != probe.axis)
    rows = rng.random(others) < 0.5
    rows.flat[0] = True
    check(gram_of(x, probe, rows), naive(x, probe, rows))


def test_masked_rows_may_hold_anything() -> None:
    x = np.ones((1, 3, 2), np.float32)
    x[0, 2] = np.nan
    got = gram_of(x, probe_of(2, axis=2), np.array([[True, True, False]]))
    assert np.array_equal(got.gram, np.full((2, 2), 2.0))
    assert got.count == 2


def test_all_rows_masked_is_no_rows() -> None:
    probe = probe_of(3)
    got = gram_of(np.ones((4, 3), np.float32), probe, np.zeros(4, np.bool_))
    assert got.count == 0
    assert not got.gram.any()


def test_mask_of_another_length_is_refused() -> None:
    with pytest.raises(DataError, match=r"'hidden'.*8 rows"):
        gram_of(np.ones((2, 4, 3)), probe_of(3, axis=2), np.ones(4, np.bool_))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_activations_are_named(bad: float) -> None:
    x = np.ones((4, 3), np.float32)
    x[1, 2] = bad
    with pytest.raises(DataError, match="1 of 12 values of activation 'hidden'"):
        gram_of(x, probe_of(3))


@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_float32_sums_out_of_range_use_float64(scale: float, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((5, 3)) * scale).astype(np.float32)
    check(gram_of(x, probe_of(3)), naive(x, probe_of(3)))


def test_float64_overflow_is_refused() -> None:
    with pytest.raises(DataError, match="'hidden' overflow"):
        gram_of(np.full((4, 3), 1e200), probe_of(3))


def test_input_is_left_alone(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 5, 3)).astype(np.float32)
    before = x.copy()
    x.setflags(write=False)
    gram_of(x, probe_of(3, axis=2))
    assert np.array_equal(x, before)


def test_views_that_are_not_contiguous(rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 5, 4)).transpose(2, 0, 1)[:, ::2]
    check(gram_of(x, probe_of(3)), naive(x, probe_of(3)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_sums_of_groups_equal_the_naive_product(layout: str, dtype: Any, rng: np.random.Generator) -> None:
    shape, probe = LAYOUTS[layout]
    batches = [(rng.standard_normal(shape) + 0.5).astype(dtype) for _ in range(5)]
    whole, part = Sums(probe), Sums(probe)
    for number, x in enumerate(batches):
        part.add(x, probe)
        if number % 2:
            whole.take(part)
    whole.take(part)
    parts = [naive(x, probe) for x in batches]
    want = Stats(gram=sum(p.gram for p in parts), total=sum(p.total for p in parts), count=sum(p.count for p in parts))
    check(whole.stats(), want, TOLERANCE[dtype])
    assert part.stats().count == 0
    assert not part.stats().gram.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_squares_are_the_diagonal(layout: str, masked: bool, scale: float, rng: np.random.Generator) -> None:
    shape, probe = LAYOUTS[layout]
    rows = rng.random([s for axis, s in enumerate(shape) if axis != probe.axis]) < 0.6 if masked else None
    batches = [(rng.standard_normal(shape) * scale).astype(np.float32) for _ in range(3)]
    total, part = Squares(probe), Squares(probe)
    for x in batches:
        part.add(x, probe, rows)
        total.take(part)
    squares, sums, count = total.drain()
    want = [naive(x, probe, rows) for x in batches]
    np.testing.assert_allclose(squares, sum(one.squares for one in want), rtol=1e-5)
    np.testing.assert_allclose(sums, sum(one.total for one in want), rtol=0, atol=1e-5 * scale * max(count, 1))
    assert count == sum(one.count for one in want)
    assert not np.any(total.drain()[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_activations_have_no_squares(bad: float) -> None:
    with pytest.raises(DataError, match="NaN or infinite"):
        Squares(probe_of(2)).add(np.array([[1.0, bad]], np.float32), probe_of(2))


def test_a_batch_out_of_range_joins_the_others(rng: np.random.Generator) -> None:
    probe, sums = probe_of(3), Sums(probe_of(3))
    batches = [(rng.standard_normal((5, 3)) * scale).astype(np.float32) for scale in (1e20, 1.0, 1e21)]
    for x in batches:
        sums.add(x, probe)
    check(sums.stats(), naive(np.concatenate(batches), probe))
