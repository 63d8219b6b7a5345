"""Products by ONNX Runtime beside those of BLAS, and when they take their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail import processor
from onnxgrail.algebra import blas
from onnxgrail.algebra.gram import gram_of
from onnxgrail.algebra.linear import Host, linear, using
from onnxgrail.algebra.pairs import Pairs, moments_of
from onnxgrail.algebra.triangles import mirrored
from onnxgrail.calibration import adder as adders
from onnxgrail.calibration.adder import NARROW, PANELS, WIDE, RuntimeAdder, fastest
from onnxgrail.calibration.lanes import solving_on
from onnxgrail.calibration.session import CPU
from onnxgrail.core import Array
from tests.unit.algebra_builders import probe_of

WIDTHS = [3, NARROW, 2 * PANELS[0] - 1, 2 * PANELS[0], WIDE + 1]


def some(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.fixture(scope="module")
def runtime() -> RuntimeAdder:
    return RuntimeAdder(threads=1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_triangles_are_added(width: int, order: Any, runtime: RuntimeAdder) -> None:
    rows = np.array(some(40, width), order=order)
    found = np.zeros((width, width), np.float32, order="F")
    for _ in range(2):
        runtime.syrk(rows.T, found, transposed=False)
    wide = rows.astype(np.float64)
    np.testing.assert_allclose(np.triu(found), np.triu(2 * wide.T @ wide), atol=1e-4)


@pytest.mark.parametrize(("dtype", "transposed"), [(np.float64, False), (np.float32, True)])
def test_other_triangles_are_those_of_blas(dtype: Any, transposed: bool, runtime: RuntimeAdder) -> None:
    a = np.asfortranarray(some(NARROW, NARROW, dtype=dtype))
    found, wanted = (np.zeros((NARROW, NARROW), dtype, order="F") for _ in range(2))
    runtime.syrk(a, found, transposed=transposed)
    blas.syrk(a, wanted, transposed=transposed)
    assert found.any()
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_products_are_added(rows: int, dtype: Any, runtime: RuntimeAdder) -> None:
    a, b, start = some(rows, 5, dtype=dtype), some(rows, 7, dtype=dtype), some(5, 7, dtype=dtype)
    found = start.copy()
    runtime.gemm(a, b, found)
    np.testing.assert_allclose(found, start + a.T @ b, rtol=1e-5, atol=1e-6)


def test_sums_are_the_same_whoever_adds(runtime: RuntimeAdder) -> None:
    """To what float32 allows: second moments, and the products that layers are fitted to."""
    x, t, probe = some(60, WIDE + 5), some(60, 11), probe_of(WIDE + 5)
    found = []
    for who in (blas, runtime):
        with using(Host(adder=who)):
            pairs = Pairs(x.shape[1], 11, 11)
            pairs.add(x, t)
            gram, *others = pairs.drain()
            found.append((gram_of(x, probe).gram, moments_of(mirrored(gram), *others)))
    (mine, theirs), scale = found, 60.0
    np.testing.assert_allclose(mine[0], theirs[0], atol=1e-6 * scale)
    np.testing.assert_allclose(mine[1].gram, theirs[1].gram, atol=1e-6 * scale)
    np.testing.assert_allclose(mine[1].cross, theirs[1].cross, atol=1e-6 * scale)


@pytest.mark.parametrize(
    ("cores", "avx512", "wanted"),
    [
        (["Haswell"], True, RuntimeAdder),
        (["Haswell"], False, type(blas)),
        (["Haswell", "SkylakeX"], True, type(blas)),
        ([], True, type(blas)),
    ],
    ids=["left out", "not there", "used", "not OpenBLAS"],
)
def test_who_is_fastest(cores: list[str], avx512: bool, wanted: type, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [{"internal_api": "openblas", "architecture": core} for core in cores]
    monkeypatch.setattr(adders, "threadpool_info", lambda: [*pools, {"internal_api": "openmp"}])
    monkeypatch.setattr(processor, "has_avx512", lambda _: avx512)
    assert type(fastest()) is wanted


def test_runs_are_added_up_by_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adders, "threadpool_info", lambda: [{"internal_api": "openblas", "architecture": "Zen"}])
    monkeypatch.setattr(processor, "has_avx512", lambda _: True)
    with solving_on(CPU):
        assert isinstance(linear().adder, RuntimeAdder)
    assert linear().adder is blas
