"""Scales and shifts per channel against loops over channels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.algebra.fit.channelwise import Affine, distance, error, moved, pooled, refit, repair, sums
from onnxgrail.core import Array, Floats, Ints

FOLD = np.array([0, 1, 0, -1, 1, 2])  # 0 and 2 are one, 1 and 4 are one, 3 is gone, 5 stays alone


def data(rows: int = 200, dense: int = 6, kept: int = 3, seed: int = 0) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    t = rng.normal(size=(rows, dense)) * rng.uniform(0.5, 2, dense) + rng.normal(size=dense)
    return t[:, :kept] @ rng.normal(size=(kept, kept)) + rng.normal(size=kept), t


def members(pool: Ints, k: int) -> list[list[int]]:
    return [[c for c, channel in enumerate(pool) if channel == j] for j in range(k)]


def test_pooling_averages_members_and_forgets_what_was_pruned() -> None:
    _, t = data()
    wanted = np.stack([t[:, m].mean(axis=1) for m in members(FOLD, 3)], axis=1)
    np.testing.assert_allclose(pooled(t, FOLD, 3), wanted)
    np.testing.assert_array_equal(pooled(t, np.array([-1, 2, -1, 0, -1, 1]), 3), t[:, [3, 5, 1]])


@given(st.integers(0, 1000), st.integers(0, 60))
@settings(max_examples=20)
def test_sums_of_two_parts_are_those_of_the_whole(seed: int, cut: int) -> None:
    y, t = data(60, seed=seed)
    whole, parts = sums(y, t, FOLD), sums(y[:cut], t[:cut], FOLD) + sums(y[cut:], t[cut:], FOLD)
    assert whole.count == parts.count
    for name in ("y", "yy", "t", "tt", "yt", "own", "square"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=1e-9)


@pytest.mark.parametrize("pool", [FOLD, np.array([0, -1, -1, 1, 2, -1])], ids=["fold", "prune"])
def test_repair_restores_the_average_mean_and_the_average_deviation(pool: Ints) -> None:
    y, t = data()
    found = repair(sums(y, t, pool), pool)
    z = y * found.scale + found.shift
    for channel, own in enumerate(members(pool, 3)):
        assert z[:, channel].mean() == pytest.approx(np.mean([t[:, c].mean() for c in own]))
        assert z[:, channel].std() == pytest.approx(np.mean([t[:, c].std() for c in own]))


def test_repair_undoes_a_scale_and_a_shift() -> None:
    _, t = data()
    found = repair(sums(t * 0.3 - 2.0, t, np.arange(6)), np.arange(6))
    np.testing.assert_allclose(found.scale, 1 / 0.3)
    np.testing.assert_allclose((t * 0.3 - 2.0) * found.scale + found.shift, t, atol=1e-9)


def test_constant_channels_keep_their_numbers() -> None:
    y, t = data(kept=4)
    t, y = t[:, :4].copy(), y.copy()
    t[:, 0], y[:, 1] = 3.0, -1.0  # constant in one network each
    y[:, 2] = 1e-5 * t[:, 2]  # hardly anything is left of it
    found = repair(sums(y, t, np.arange(4)), np.arange(4))
    np.testing.assert_array_equal(found.scale[:3], 1.0)
    np.testing.assert_array_equal(found.shift[:3], 0.0)
    assert found.scale[3] == pytest.approx(t[:, 3].std() / y[:, 3].std())


def halves(y: Array, t: Array, pool: Ints) -> tuple[Array, Array, Affine | None]:
    held = np.arange(len(y)) % 4 == 3
    found = refit(sums(y[~held], t[~held], pool), sums(y[held], t[held], pool), shifts=True)
    return y[held], pooled(t, pool, y.shape[1])[held], found


def test_refit_is_least_squares_per_channel() -> None:
    y, t = data()
    held = np.arange(len(y)) % 4 == 3
    found = refit(sums(y[~held], t[~held], FOLD), sums(y[held], t[held], FOLD), shifts=True, alphas=(1e-12,))
    assert found is not None
    goal = pooled(t, FOLD, 3)
    for channel in range(3):
        line = np.polyfit(y[~held, channel], goal[~held, channel], 1)
        np.testing.assert_allclose([found.scale[channel], found.shift[channel]], line, atol=1e-8)


def test_refit_without_a_bias_goes_through_the_origin() -> None:
    y, t = data()
    both = sums(y, t, FOLD)
    found = refit(both, both, shifts=False, alphas=(1e-12,))
    assert found is not None
    goal = pooled(t, FOLD, 3)
    np.testing.assert_allclose(found.scale, [y[:, c] @ goal[:, c] / (y[:, c] @ y[:, c]) for c in range(3)])
    np.testing.assert_array_equal(found.shift, 0.0)


def test_a_strong_ridge_keeps_the_scale() -> None:
    y, t = data()
    both = sums(y, t, FOLD)
    found = refit(both, both, shifts=True, alphas=(1e9,))
    assert found is not None
    np.testing.assert_allclose(found.scale, 1.0, atol=1e-6)
    np.testing.assert_allclose(found.shift, pooled(t, FOLD, 3).mean(axis=0) - y.mean(axis=0), atol=1e-6)


def test_what_does_not_hold_up_is_not_taken() -> None:
    """Held-out rows that are right already."""
    y, t = data(40)
    same = pooled(t, FOLD, 3)
    assert refit(sums(y, t, FOLD), sums(same, t, FOLD), shifts=True) is None


def test_the_error_is_the_sum_of_squares() -> None:
    y, t = data()
    affine = Affine(np.array([1.0, -2.0, 0.3]), np.array([0.5, 0.0, -1.0]))
    wanted = np.square(y * affine.scale + affine.shift - pooled(t, FOLD, 3)).sum()
    assert error(sums(y, t, FOLD), affine) == pytest.approx(wanted)
    assert distance(sums(y, t, FOLD)) == pytest.approx(np.square(y - pooled(t, FOLD, 3)).sum())
    assert moved(sums(y, t, FOLD), affine) == pytest.approx(np.square(y * affine.scale + affine.shift - y).sum())


def test_held_out_rows_choose_the_ridge() -> None:
    y, t = data(12, seed=3)
    apart, goal, found = halves(y, t, FOLD)
    if found is not None:
        assert np.square(apart * found.scale + found.shift - goal).sum() < np.square(apart - goal).sum()
    many = [halves(*data(12, seed=s), FOLD)[2] for s in range(20)]
    assert any(f is not None for f in many)
