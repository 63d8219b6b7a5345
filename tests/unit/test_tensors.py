"""The work of torch on a device beside sums, taken on the CPU; `test_lanes.py` holds the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.solve import linear
from onnxgrail.calibration.devices import lanes
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import Probe
from onnxgrail.machine.device import Device

torch = pytest.importorskip("torch")

from onnxgrail.calibration.devices import sums  # noqa: E402  needs torch
from onnxgrail.calibration.devices.sums import TensorPairs, TensorSums  # noqa: E402
from onnxgrail.calibration.devices.tensors import TensorLane  # noqa: E402


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
        raise torch.OutOfMemoryError("CUDA out of memory.")

    matrix, device = 2.0 * np.eye(3), TensorLinear(Device(), side=1)
    factor = device.cholesky(matrix.copy())
    monkeypatch.setattr(TensorLinear, "_there", full)
    rhs = np.arange(6.0).reshape(3, 2)
    np.testing.assert_allclose(factor.solve(rhs), rhs / 2)
    np.testing.assert_allclose(device.cholesky(matrix.copy()).solve(rhs), rhs / 2)
    np.testing.assert_allclose(device.inverse(matrix), np.eye(3) / 2)
    np.testing.assert_allclose(device.product(matrix, rhs), 2 * rhs)


def breaking(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, number: int) -> list[int]:
    """Let one call of a function fail as on a full device; return a list that counts its calls."""
    whole, calls = getattr(place, name), [0]

    def once(*given: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return whole(*given, **options)

    monkeypatch.setattr(place, name, once)
    return calls


def unharmed(added: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, number: int) -> None:
    """Check that sums come out the same, bit by bit, if one call of a function fails as on a full device."""
    whole = added()
    calls = breaking(monkeypatch, place, name, number)
    parts = added()
    assert calls[0] > number
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)


FULL = {
    "rows": (sums, "_rows", np.float32, (1, 2, 4)),
    "products": (sums, "_grown", np.float32, (1, 2, 3, 8)),
    "sums": (sums, "_added", np.float64, (1, 2, 3, 8)),
    "widening": (torch.Tensor, "double", np.float64, (1, 2, 3, 8)),
    "merging": (torch.Tensor, "double", np.float32, (1,)),
}


@pytest.mark.parametrize(
    ("place", "name", "dtype", "number"),
    [pytest.param(*how, n, id=f"{key} {n}") for key, (*how, numbers) in FULL.items() for n in numbers],
)
def test_sums_move_to_the_host_if_the_device_is_full(
    place: Any, name: str, dtype: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "NUMBERS", 24)  # several parts of each batch
    probe = Probe(value="x", axis=1, index=np.arange(4)[:, None], pooled=False)
    batches = [np.random.default_rng(seed).standard_normal((9, 4)).astype(dtype) for seed in range(4)]

    def added() -> Any:
        total, part = TensorSums(probe, Device()), TensorSums(probe, Device())
        for x in batches:
            part.add(torch.from_numpy(x), probe)
            total.take(part)
        return total.drain()

    unharmed(added, monkeypatch, place, name, number)


@pytest.mark.parametrize(
    ("place", "name", "number"),
    [
        pytest.param(*how, n, id=f"{how[1]} {n}")
        for how, numbers in {(sums, "tensor"): (1, 2, 3, 5), (sums, "_all_added"): (1, 2, 4)}.items()
        for n in numbers
    ],
)
def test_products_for_a_fit_move_to_the_host_if_the_device_is_full(
    place: Any, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "TOGETHER", 10)
    rng = np.random.default_rng(0)
    batches = [[torch.from_numpy(rng.standard_normal((9, c)).astype(np.float32)) for c in (5, 3)] for _ in range(3)]

    def added() -> Any:
        pairs = TensorPairs(5, 3, Device())
        for z, t in batches:
            pairs.add(z, t)
        return pairs.drain()

    unharmed(added, monkeypatch, place, name, number)


def test_activations_move_to_the_host_if_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, x = TensorLane(Device()), np.arange(12, dtype=np.float32).reshape(3, 4)
    there, stays = torch.from_numpy(x.copy()), np.array([True, False, True, True])
    for place, name in ((torch.Tensor, "clone"), (torch, "index_select"), (torch, "cat")):
        breaking(monkeypatch, place, name, 1)
    kept, some, both = lane.kept(there, 1000), lane.compress(stays, there, 1), lane.concatenate([there, x], 0)
    assert all(isinstance(array, np.ndarray) for array in (kept, some, both))
    there[:] = 0  # what borrowed its memory would change
    np.testing.assert_array_equal(kept, x)
    np.testing.assert_array_equal(some, x[:, stays])
    np.testing.assert_array_equal(both, np.concatenate([x, x]))
    assert all(torch.is_tensor(lane.kept(torch.from_numpy(x), 1000)) for _ in range(2))


def test_other_failures_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "cat", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        TensorLane(Device()).concatenate([np.ones(2)], 0)


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
    from onnxgrail.calibration.devices.sums import _ieee

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with _ieee():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
