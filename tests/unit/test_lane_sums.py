"""Second moments added up on a device, held against those of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.moments.cross import TOGETHER
from onnxgrail.algebra.moments.gram import Sums
from onnxgrail.algebra.moments.triangles import unpacked
from onnxgrail.calibration.devices.lanes import HOST
from onnxgrail.calibration.devices.values import ValueSums
from onnxgrail.calibration.stream.rows import ALL
from onnxgrail.core import Array, Probe
from onnxgrail.errors import DataError
from tests.unit.test_gram import LAYOUTS
from tests.unit.ways import Way, every_way


@every_way
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["products", "squares"])
def test_sums_are_those_of_the_host(way: Way, name: str, dtype: Any, masked: bool, alone: bool) -> None:
    shape, probe = LAYOUTS[name]
    probe = replace(probe, alone=alone)
    rng = np.random.default_rng(1)
    rows = rng.random([s for axis, s in enumerate(shape) if axis != probe.axis]) < 0.6 if masked else None
    found = []
    for lane in (HOST, way.lane()):
        total, part = lane.sums(probe), lane.sums(probe)
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
            part.add(x if lane is HOST else way.there(x), probe, rows)
            if seed != 1:
                total.take(part)
        found.append(total.drain())
        assert total.drain()[2] == 0
    (half, sums, count), (other, others, number) = found
    assert count == number > 0
    other, half = (array if alone else unpacked(array, probe.width) for array in (other, half))
    np.testing.assert_allclose(other, half, rtol=0, atol=1e-5 * np.abs(half).max())
    np.testing.assert_allclose(others, sums, rtol=0, atol=1e-5 * count)


@every_way
@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_may_hold_anything(way: Way, name: str) -> None:
    shape, probe = LAYOUTS[name]
    rng = np.random.default_rng(2)
    x = rng.standard_normal(shape).astype(np.float32)
    rows = rng.random([s for axis, s in enumerate(shape) if axis != probe.axis]) < 0.6
    np.moveaxis(x, probe.axis, -1)[~rows] = np.nan
    sums = way.lane().sums(probe)
    sums.add(way.there(x), probe, rows)
    if isinstance(sums, ValueSums):  # the host knows what is padding, so what it adds up proves nothing
        assert sums._rest.stats().count == 0
    total = way.lane().sums(probe)
    total.take(sums)
    assert np.isfinite(total.drain()[0]).all()


@every_way
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_squares_neither_vanish_nor_overflow(way: Way, scale: float) -> None:
    x = (np.random.default_rng(0).standard_normal((9, 4)) * scale).astype(np.float32)
    probe = Probe(value="x", axis=1, index=np.arange(4)[:, None], pooled=False)
    found = []
    for lane in (HOST, way.lane()):
        total = lane.sums(probe)
        total.take(_with(lane.sums(probe), x, probe))
        found.append(total.drain()[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
    assert found[0].any()


def _with(sums: Any, x: Array, probe: Probe) -> Any:
    sums.add(x, probe)
    return sums


@every_way
def test_a_batch_that_float32_cannot_sum_is_added_to_those_that_it_can(way: Way) -> None:
    rng, probe = np.random.default_rng(0), Probe(value="x", axis=1, index=np.arange(4)[:, None], pooled=False)
    batches = [(rng.standard_normal((9, 4)) * scale).astype(np.float32) for scale in (1e10, 1e15, 1e10, 0)]
    lane = way.lane()
    total, part = lane.sums(probe), lane.sums(probe)
    for x in batches:
        part.add(way.there(x), probe)
        total.take(part)
    half, sums, count = total.drain()
    rows = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(unpacked(half, 4), rows.T @ rows, rtol=1e-6, atol=1e24)
    np.testing.assert_allclose(sums, rows.sum(axis=0), rtol=1e-6)
    assert count == 36


@every_way
def test_float32_within_a_batch_costs_little(way: Way) -> None:
    probe = Probe(value="x", axis=1, index=np.arange(48)[:, None], pooled=False)
    rows = (np.random.default_rng(0).standard_normal((20000, 48)) + 3).astype(np.float32)  # far from zero: sums grow
    lane = way.lane()
    total, part = lane.sums(probe), lane.sums(probe)
    part.add(way.there(rows), probe)
    total.take(part)
    half, sums, _ = total.drain()
    wide = rows.astype(np.float64)
    want = wide.T @ wide
    assert np.abs(unpacked(half, 48) - want).max() <= 2e-6 * want.max()
    np.testing.assert_allclose(sums, wide.sum(axis=0), rtol=2e-6)


@every_way
@pytest.mark.parametrize("through", [False, True], ids=["targets", "inputs of the targets"])
@pytest.mark.parametrize(("features", "count"), [(5, 30), (5, TOGETHER + 9), (1100, 40)], ids=str)
def test_products_for_a_fit_are_those_of_the_host(way: Way, features: int, count: int, through: bool) -> None:
    rng = np.random.default_rng(0)
    batches = [[rng.standard_normal((n, c)).astype(np.float32) for c in (features, 3, 4)] for n in (count, 0, 7)]
    found = []
    for lane in (HOST, way.lane()):
        pairs = lane.pairs(features, 3)
        assert all(not array.size for array in pairs.drain())
        for _ in range(2):  # drained sums start anew
            for z, t, x in batches:
                pairs.add(*(lane.rows(a if lane is HOST else way.there(a), 1, ALL) for a in (z, t, x)[: 2 + through]))
            sums = pairs.drain()
        found.append((unpacked(sums[0], features), *sums[1:]))
    for one, other in zip(*found, strict=True):
        assert (other.dtype, other.shape) == (one.dtype, one.shape)
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * np.abs(one).max())


@every_way
def test_what_cannot_be_summed_is_refused_in_the_same_words(way: Way) -> None:
    probe = Probe(value="x", axis=1, index=np.arange(2)[:, None], pooled=False)
    bad = np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)
    words = []
    for sums in (Sums(probe), way.lane().sums(probe)):
        with pytest.raises(DataError) as error:
            sums.add(bad, probe)
        words.append(str(error.value))
        with pytest.raises(DataError, match="3 entries"):
            sums.add(np.ones((2, 2), np.float32), probe, np.ones(3, bool))
    assert words[0] == words[1]
    assert "2 of 4 values" in words[0]
