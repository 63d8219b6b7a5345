"""Activations as torch tensors that share the memory of ONNX Runtime; only sums are copied to the host.

The same code runs and is tested on a CPU; only names and synchronization differ on a GPU.  There, ONNX Runtime and
torch use different streams: a run ends when its outputs are ready, and torch must have finished with borrowed outputs
before the next run, which may overwrite their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from onnxgrail.calibration.devices.lanes import HOST
from onnxgrail.calibration.devices.sums import NUMPY, TensorPairs, TensorSums, tensor
from onnxgrail.calibration.devices.values import ends, fits, handed_on
from onnxgrail.calibration.runtime.provider import room_for
from onnxgrail.calibration.runtime.session import Session
from onnxgrail.calibration.stream.rows import Where
from onnxgrail.core import Array, Bools, Feed, Probe
from onnxgrail.graph.io.running.widen import wide
from onnxgrail.machine.device import Device

FLOATS = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(double)": torch.float64}
SHARE = 4  # 1 / SHARE of a GPU's free memory may hold cached activations


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
            return HOST.compress(stays, self.host(array), axis)

        def there() -> Any:
            return torch.index_select(array, axis, torch.tensor(np.flatnonzero(stays), device=self._device.place))

        return room_for(there, here) if torch.is_tensor(array) else here()

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Any:
        """Return the concatenated arrays, as a tensor on the device if there is room."""
        return room_for(
            lambda: torch.cat([tensor(array, self._device) for array in arrays], dim=axis),
            lambda: HOST.concatenate([self.host(array) for array in arrays], axis),
        )

    def rows(self, array: Array, axis: int, where: Where) -> Any:
        """Return float32 rows (n, channels) at flat positions, on the device if there is room."""

        def there() -> Any:
            moved = tensor(array, self._device).movedim(axis, -1).reshape(-1, array.shape[axis])
            chosen = moved if isinstance(where, slice) else moved[torch.from_numpy(where).to(moved.device)]
            return chosen.float()

        return room_for(there, lambda: HOST.rows(self.host(array), axis, where))

    def minus(self, array: Array, other: Array) -> Any:
        """Return the difference of two arrays, on the device if there is room."""
        return room_for(
            lambda: tensor(array, self._device) - tensor(other, self._device),
            lambda: HOST.minus(self.host(array), self.host(other)),
        )

    def sums(self, probe: Probe) -> TensorSums:
        """Return an accumulator of the probe's second moments on the device."""
        return TensorSums(probe, self._device)

    def pairs(self, features: int, outputs: int) -> TensorPairs:
        """Return an accumulator of products for a fit on the device."""
        return TensorPairs(features, outputs, self._device)
