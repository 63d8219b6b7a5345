"""The work of torch on a device beside sums, taken on the CPU; `test_lanes.py` holds the sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.solve import linear
from onnxgrail.calibration.devices import lanes
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.machine.device import Device

torch = pytest.importorskip("torch")


def test_large_matrices_are_solved_there() -> None:
    from onnxgrail.calibration.devices.solver import TensorLinear

    rng = np.random.default_rng(0)
    half = rng.standard_normal((40, 30))
    matrix, rhs, device = half.T @ half, rng.standard_normal((30, 7)), TensorLinear(Device(), side=1)
    np.testing.assert_allclose(device.product(half, matrix), half @ matrix, rtol=1e-12)
    np.testing.assert_allclose(device.inverse(matrix), np.linalg.inv(matrix), rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(device.picked(half, np.array([3, 1]), np.array([2, 0])), half[[3, 1]][:, [2, 0]])
    factor, wanted = device.cholesky(matrix.copy()), linear.HOST.cholesky(matrix.copy())
    np.testing.assert_allclose(factor.diagonal, wanted.diagonal, rtol=1e-12)
    np.testing.assert_allclose(factor.solve(rhs), wanted.solve(rhs), rtol=1e-9)
    np.testing.assert_allclose(factor.solve(rhs[:, 0]), wanted.solve(rhs[:, 0]), rtol=1e-9)
    for bad in (-np.eye(3), np.full((3, 3), np.nan)):
        with pytest.raises(np.linalg.LinAlgError):
            device.inverse(bad)
    with pytest.raises(np.linalg.LinAlgError):
        device.cholesky(-np.eye(3))


def test_a_full_device_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrail.calibration.devices.solver import TensorLinear

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    matrix, device = 2.0 * np.eye(3), TensorLinear(Device(), side=1)
    factor = device.cholesky(matrix.copy())
    monkeypatch.setattr(TensorLinear, "_there", full)
    rhs = np.arange(6.0).reshape(3, 2)
    np.testing.assert_allclose(factor.solve(rhs), rhs / 2)
    np.testing.assert_allclose(device.cholesky(matrix.copy()).solve(rhs), rhs / 2)
    np.testing.assert_allclose(device.inverse(matrix), np.eye(3) / 2)
    np.testing.assert_allclose(device.product(matrix, rhs), 2 * rhs)


def test_solving_goes_where_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrail.calibration.devices import solver

    with lanes.solving_on(CPU):
        assert isinstance(linear.linear(), linear.Host)
    monkeypatch.setattr(lanes, "why_host", lambda providers: "")
    with lanes.solving_on(("CUDAExecutionProvider:1",)):
        assert isinstance(linear.linear(), solver.TensorLinear)
        assert linear.linear()._device.place == "cuda:1"
    assert linear.linear() is linear.HOST


def test_exact_products_stay_exact_where_a_program_wants_fast_ones() -> None:
    from onnxgrail.calibration.devices.tensors import _ieee

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with _ieee():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
