"""Activations as torch tensors that share the memory of ONNX Runtime; only sums are copied to the host.

The same code runs and is tested on a CPU; only names and synchronization differ on a GPU.  There, ONNX Runtime and
torch use different streams: a run ends when its outputs are ready, and torch must have finished with borrowed outputs
before the next run, which may overwrite their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch

from onnxgrail.algebra.moments.gram import LARGEST, SMALLEST, not_finite, wrong_mask
from onnxgrail.algebra.moments.triangles import length, packed
from onnxgrail.calibration.devices.values import ends, fits, handed_on
from onnxgrail.calibration.runtime.provider import room_for
from onnxgrail.calibration.runtime.session import Session
from onnxgrail.core import Array, Bools, Feed, Floats, Probe
from onnxgrail.graph.io.widen import wide
from onnxgrail.machine.device import Device

FLOATS = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(double)": torch.float64}
NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.float64: np.float64}
SHARE = 4  # 1 / SHARE of a GPU's free memory may hold cached activations
NUMBERS = 2**26  # values of rows multiplied at once: bounds the memory for their wider copies

T = TypeVar("T")


def sees(device: Device) -> bool:
    """Return True if torch can use the device."""
    return device.kind == "cpu" or (torch.cuda.is_available() and device.number < torch.cuda.device_count())


def settled(device: Device) -> None:
    """Wait until torch has finished all its work on the device."""
    if device.kind == "cuda":
        torch.cuda.synchronize(device.place)


class TensorLane:
    """A lane that keeps floating-point activations in torch tensors on a device, and on the host if it is full.

    Integers and booleans, which are small and determine shapes, stay on the host.
    """

    whole = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self.room = device.memory or 0
        if device.kind == "cuda":
            free = torch.cuda.mem_get_info(device.place)[0] // SHARE
            self.room = free if device.memory is None else min(free, device.memory)

    def run(self, session: Session, feed: Feed) -> dict[str, Array]:
        """Run a session; return its outputs by name.

        Floating-point outputs borrow memory of ONNX Runtime, which it can use again when they are released.
        """
        there, made = ends(session, feed)
        if not fits(there, made, torch.is_tensor):
            return session.run({name: self.host(array) for name, array in there.items()})
        feed = {name: array.contiguous() if torch.is_tensor(array) else array for name, array in there.items()}
        settled(self._device)
        values = session.run_bound(feed, self._binder(session, feed, made)) if made else []
        found = handed_on(session, feed)
        for (name, kind), value in zip(made.items(), values, strict=True):
            found[name] = torch.from_dlpack(value) if kind in FLOATS else np.array(value.numpy())
        return found

    def _binder(self, session: Session, feed: Feed, made: Mapping[str, str]) -> Callable[[Any], None]:
        """Return a function that binds inputs to their memory and outputs to their device."""
        kind, number = self._device.kind, self._device.number

        def bind(binding: Any) -> None:
            for name in session.inputs:
                array: Any = feed[name]
                if torch.is_tensor(array) and array.numel():
                    binding.bind_input(name, kind, number, NUMPY[array.dtype], tuple(array.shape), array.data_ptr())
                else:
                    binding.bind_cpu_input(name, np.asarray(wide(self.host(array)), order="C"))
            for name, output in made.items():
                binding.bind_output(name, *((kind, number) if output in FLOATS else ("cpu", 0)))

        return bind

    def kept(self, array: Any, room: int) -> Any:
        """Return a copy for later use, so that borrowed memory can be released."""
        fits = torch.is_tensor(array) and self.size(array) <= room
        return room_for(array.clone, lambda: self.host(array)) if fits else self.host(array)

    def size(self, array: Any) -> int:
        """Return the bytes on the device."""
        return int(array.numel() * array.element_size()) if torch.is_tensor(array) else 0

    def host(self, array: Any) -> Any:
        """Return the array on the host, copied if it is a tensor."""
        if not torch.is_tensor(array):
            return array
        return array.to("cpu", copy=True).numpy()

    def compress(self, stays: Bools, array: Any, axis: int) -> Any:
        """Return the positions of an axis that `stays` selects."""

        def here() -> Array:
            return np.compress(stays, self.host(array), axis=axis)

        def there() -> Any:
            return torch.index_select(array, axis, torch.tensor(np.flatnonzero(stays), device=self._device.place))

        return room_for(there, here) if torch.is_tensor(array) else here()

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Any:
        """Return the concatenated arrays, as a tensor on the device if there is room."""
        return room_for(
            lambda: torch.cat([tensor(array, self._device) for array in arrays], dim=axis),
            lambda: np.concatenate([self.host(array) for array in arrays], axis=axis),
        )

    def sums(self, probe: Probe) -> TensorSums:
        """Return an accumulator of the probe's second moments on the device."""
        return TensorSums(probe, self._device)


class TensorSums:
    """Second moments like `Sums`, on a device: a float32 matrix of a few batches, added to a float64 matrix.

    If the device is full, the sums move to the host and the rest is added there.
    """

    def __init__(self, probe: Probe, device: Device) -> None:
        self._probe, self._device = probe, device
        self._single: Any = None
        self._double: Any = None
        self._total: Any = self._zeros(probe.width)
        self._count = 0

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
        self._count += len(flat)

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

    def _with_room(self, work: Callable[[], T]) -> T:
        """Return the result of work with the sums; if the device is full, again after they have moved to the host."""

        def on_the_host() -> T:
            self._device = Device()
            self._single, self._double, self._total = (
                None if sums is None else sums.cpu() for sums in (self._single, self._double, self._total)
            )
            return work()

        return room_for(work, on_the_host)

    def take(self, part: TensorSums) -> None:
        """Add the sums of `part` in float64 and reset `part`."""
        for matrix in (part._single, part._double):
            if matrix is not None:
                self._with_room(lambda matrix=matrix: self._merge(matrix))  # type: ignore[misc]
        self._total += part._total.to(self._total.device)
        self._count += part._count
        part._single = part._double = None
        part._total, part._count = part._zeros(self._probe.width), 0

    def drain(self) -> tuple[Floats, Floats, int]:
        """Return the sums on the host and reset: the triangle, sums (h,) and the number of rows.

        If the probe's channels stand alone, the triangle is a diagonal (h,).
        """
        width, alone = self._probe.width, self._probe.alone
        if self._double is None:
            half = np.zeros(width if alone else length(width))
        else:
            half = self._double.cpu().numpy() if alone else packed(self._double.cpu().numpy())
        found = half, self._total.cpu().numpy(), self._count
        self._double, self._total, self._count = None, self._zeros(width), 0
        return found

    def _merge(self, matrix: Any) -> None:
        matrix = matrix.to(self._device.place)
        self._double = matrix.double() if self._double is None else self._double.add_(matrix)

    def _zeros(self, count: int) -> Any:
        return torch.zeros(count, dtype=torch.float64, device=self._device.place)


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
