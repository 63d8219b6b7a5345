"""Sums over rows of activations that are torch tensors on a device; they move to the host if the device is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch

from onnxgrail.algebra.moments.cross import TOGETHER
from onnxgrail.algebra.moments.gram import LARGEST, SMALLEST, not_finite, wrong_mask
from onnxgrail.algebra.moments.triangles import length, packed
from onnxgrail.calibration.runtime.provider import room_for
from onnxgrail.core import Array, Bools, Floats, Probe
from onnxgrail.machine.device import Device

NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.float64: np.float64}
NUMBERS = 2**26  # values of rows multiplied at once: bounds the memory for their wider copies

T = TypeVar("T")


class _Sums:
    """Sums in tensors on a device; if it is full, they move to the host and the rest is added there."""

    _device: Device

    def _with_room(self, work: Callable[[], T]) -> T:
        """Return the result of work with the sums; if the device is full, again after they have moved to the host."""

        def on_the_host() -> T:
            self._device = Device()
            self._move()
            return work()

        return room_for(work, on_the_host)

    def _move(self) -> None:
        """Move all tensors to the host."""
        raise NotImplementedError


class TensorSums(_Sums):
    """Second moments like `Sums`, on a device: a float32 matrix of a few batches, added to a float64 matrix."""

    def __init__(self, probe: Probe, device: Device) -> None:
        self._probe, self._device = probe, device
        self._single: Any = None
        self._double: Any = None
        self._total: Any = self._zeros(probe.width)
        self.count = 0

    def add(self, x: Array, placed: Probe, rows: Bools | None = None) -> None:
        """Add the rows of one batch, see `Sums.add`.

        Raises:
            DataError: `rows` and the activation differ in length, or a value is not finite.
        """
        flat = self._with_room(lambda: _rows(tensor(x, self._device), placed, rows))
        if not len(flat):
            return
        low, high = torch.aminmax(flat)  # NaN if a value is NaN
        peak = max(float(high), -float(low))
        if not np.isfinite(peak):
            raise not_finite(flat.numel() - int(torch.isfinite(flat).sum()), flat.numel(), placed)
        single = flat.dtype != torch.float64 and (peak == 0.0 or SMALLEST < peak < LARGEST)
        for some in flat.split(max(1, NUMBERS // self._probe.width)):
            self._with_room(lambda some=some: self._include(tensor(some, self._device), single))  # type: ignore[misc]
        self.count += len(flat)

    def _include(self, rows: Any, single: bool) -> None:
        """Add rows (n, h), or change nothing if the device is full: every step that needs memory precedes the sums."""
        total = rows.sum(0, dtype=torch.float64)
        if self._probe.alone:
            self._double = _added(self._double, rows.double().square().sum(0))
        elif single:
            self._single = _grown(self._single, rows)
        else:
            wide = rows.double()
            self._double = _added(self._double, wide.T @ wide)
        self._total += total

    def _move(self) -> None:
        sums = self._single, self._double, self._total
        self._single, self._double, self._total = (None if matrix is None else matrix.cpu() for matrix in sums)

    def take(self, part: TensorSums) -> None:
        """Add the sums of `part` in float64 and reset `part`."""
        for matrix in (part._single, part._double):
            if matrix is not None:
                self._with_room(lambda matrix=matrix: self._merge(matrix))  # type: ignore[misc]
        self._total += part._total.to(self._total.device)
        self.count += part.count
        part._single = part._double = None
        part._total, part.count = part._zeros(self._probe.width), 0

    def drain(self) -> tuple[Floats, Floats, int]:
        """Return the sums on the host and reset: the triangle, sums (h,) and the number of rows.

        If the probe's channels stand alone, the triangle is a diagonal (h,).
        """
        width, alone = self._probe.width, self._probe.alone
        if self._double is None:
            half = np.zeros(width if alone else length(width))
        else:
            half = self._double.cpu().numpy() if alone else packed(self._double.cpu().numpy())
        found = half, self._total.cpu().numpy(), self.count
        self._double, self._total, self.count = None, self._zeros(width), 0
        return found

    def _merge(self, matrix: Any) -> None:
        matrix = matrix.to(self._device.place)
        self._double = matrix.double() if self._double is None else self._double.add_(matrix)

    def _zeros(self, count: int) -> Any:
        return torch.zeros(count, dtype=torch.float64, device=self._device.place)


class TensorPairs(_Sums):
    """Sums like `cross.Pairs`, on a device: of a few thousand rows in float32, and of these sums in float64."""

    def __init__(self, features: int, outputs: int, device: Device) -> None:  # noqa: ARG002  like `Pairs`
        self._device = device
        self._several = length(features) < features**2
        self._single: list[Any] = []  # z zᵀ, z xᵀ, and the sums of z, of x and of t², which are float64 from the start
        self._double: list[Any] = []
        self._count = self._rows = 0  # rows in all sums, and in the float32 sums

    def add(self, z: Array, t: Array, x: Array | None = None) -> None:
        """Add rows of float32 z (n, features), t (n, outputs) and, if that is not t, x (n, inputs)."""
        if not len(z):
            return
        arrays = z, t, t if x is None else x
        self._with_room(lambda: self._include(*(tensor(array, self._device) for array in arrays)))
        self._count, self._rows = self._count + len(z), self._rows + len(z)
        if self._rows >= TOGETHER:
            self._with_room(self._take)

    def drain(self) -> tuple[Array, ...]:
        """Return the sums on the host, the triangle of z zᵀ first (empty arrays if there were no rows); reset them."""
        if not self._count:
            return (np.zeros(0),) * 6
        if self._double or not self._several:
            self._with_room(self._take)
        kind = np.float32 if self._several else np.float64
        gram, cross, *small = (sums.cpu().numpy() for sums in self._double or self._single)
        large = (array.astype(kind, copy=False) for array in (packed(gram), cross))
        found = *large, *small, np.array([self._count], np.float64)
        self._single, self._double, self._count, self._rows = [], [], 0, 0
        return found

    def _include(self, z: Any, t: Any, x: Any) -> None:
        with _ieee():
            parts = [z.T @ z, z.T @ x]
        parts += [z.sum(0, dtype=torch.float64), x.sum(0, dtype=torch.float64), t.square().sum(0, dtype=torch.float64)]
        self._single = _all_added(self._single, parts)

    def _take(self) -> None:
        """Move the float32 sums into the float64 sums."""
        if self._rows:
            wide = self._single if self._double else [part.double() for part in self._single]
            self._single, self._double, self._rows = [], _all_added(self._double, wide), 0

    def _move(self) -> None:
        self._single, self._double = ([sums.cpu() for sums in some] for some in (self._single, self._double))


def tensor(array: Any, device: Device) -> Any:
    """Return an array as a tensor on a device; float16, float32 and float64 keep their dtype."""
    if torch.is_tensor(array):
        return array.to(device.place)
    array = array if array.dtype in NUMPY.values() else array.astype(np.float32)
    return torch.tensor(np.ascontiguousarray(array), device=device.place)


def _rows(x: Any, probe: Probe, rows: Bools | None) -> Any:
    """Return the probe's channels as rows (n, h), without rows that the mask excludes."""
    channels = x.shape[probe.axis]
    lead, trail = (int(np.prod(part, dtype=np.int64)) for part in (x.shape[: probe.axis], x.shape[probe.axis + 1 :]))
    values = x.reshape(lead, channels, trail)
    index = probe.index.ravel()
    if not np.array_equal(index, np.arange(channels)):
        values = values.index_select(1, torch.tensor(index, device=x.device))
    members = index.size // probe.width
    stack = values.reshape(lead, probe.width, members, trail)
    flat = stack.permute(0, 3, 2, 1)  # (lead, trail, members, h): the mask selects all members of a row
    if rows is None:
        return flat.reshape(-1, probe.width)
    if rows.size != lead * trail:
        raise wrong_mask(rows.size, lead * trail, probe)
    chosen = torch.tensor(np.flatnonzero(rows), device=x.device)
    return flat.reshape(lead * trail, members, probe.width).index_select(0, chosen).reshape(-1, probe.width)


def _grown(total: Any, rows: Any) -> Any:
    """Add the products of rows (n, h) to a float32 matrix in place."""
    if rows.dtype == torch.float16 and rows.is_cuda:
        # Products of float16 are exact in float32, in which tensor cores add them.
        with suppress(TypeError, NotImplementedError):  # versions of torch without out_dtype
            return _added(total, torch.mm(rows.T, rows, out_dtype=torch.float32))
    rows = rows.float()
    with _ieee():
        return rows.T @ rows if total is None else total.addmm_(rows.T, rows)


def _added(total: Any, part: Any) -> Any:
    return part if total is None else total.add_(part)


@contextmanager
def _ieee() -> Iterator[None]:
    """Compute float32 products in full precision, whatever precision the program has set."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _all_added(totals: list[Any], parts: list[Any]) -> list[Any]:
    """Add parts to totals in place."""
    return [_added(*pair) for pair in zip(totals, parts, strict=True)] if totals else parts
