"""Lanes: where activations stay between runs and where second moments are summed: the host, torch or ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from onnxgrail.algebra.moments.cross import Pairs
from onnxgrail.algebra.moments.gram import Kept, Squares, Sums
from onnxgrail.algebra.solve.linear import Host, using
from onnxgrail.calibration.runtime.session import Session, runtime
from onnxgrail.calibration.runtime.threads import of_solving
from onnxgrail.calibration.stream.rows import Where, outputs
from onnxgrail.core import Array, Bools, Feed, Probe
from onnxgrail.machine.device import Device, device_of


class Lane(Protocol):
    """The operations of a stream on activations, whose array type is known only to the lane.

    Attributes:
        room: bytes of activations that may be kept on the device.
        whole: True if all batches of a process form one partial sum, because a copy to the host is expensive.
    """

    room: int
    whole: bool

    def run(self, session: Session, feed: Feed) -> dict[str, Array]:
        """Run a session; return its outputs by name. Outputs that are used later must be passed to `kept`."""

    def kept(self, array: Array, room: int) -> Array:
        """Return the array for later use: on the device if it takes at most `room` bytes, else on the host."""

    def size(self, array: Array) -> int:
        """Return the bytes on the device."""

    def host(self, array: Array) -> Array:
        """Return the array on the host."""

    def compress(self, stays: Bools, array: Array, axis: int) -> Array:
        """Return the positions of an axis that `stays` selects."""

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Return the concatenated arrays."""

    def rows(self, array: Array, axis: int, where: Where) -> Array:
        """Return float32 rows (n, channels) at flat positions over all axes but that of the channels."""

    def minus(self, array: Array, other: Array) -> Array:
        """Return the difference of two arrays."""

    def sums(self, probe: Probe) -> Any:
        """Return an accumulator of the probe's second moments, with `add`, `take`, `drain` and `count` of `Sums`."""

    def pairs(self, features: int, outputs: int) -> Any:
        """Return an accumulator of products for a fit, with the methods `add` and `drain` of `Pairs`."""


class HostLane:
    """A lane that keeps activations in NumPy arrays."""

    room, whole = 0, False

    def run(self, session: Session, feed: Feed) -> dict[str, Array]:
        """Run a session; return its outputs by name."""
        return session.run(feed)

    def kept(self, array: Array, room: int) -> Array:  # noqa: ARG002  signature of the protocol
        """Return the array."""
        return array

    def size(self, array: Array) -> int:  # noqa: ARG002
        """Return 0: nothing is on a device."""
        return 0

    def host(self, array: Array) -> Array:
        """Return the array."""
        return array

    def compress(self, stays: Bools, array: Array, axis: int) -> Array:
        """Return the positions of an axis that `stays` selects."""
        return np.compress(stays, array, axis=axis)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Return the concatenated arrays."""
        return np.concatenate(arrays, axis=axis)

    def rows(self, array: Array, axis: int, where: Where) -> Array:
        """Return float32 rows (n, channels) at flat positions over all axes but that of the channels."""
        return outputs(self.host(array), axis, where).astype(np.float32, copy=False)

    def minus(self, array: Array, other: Array) -> Array:
        """Return the difference of two arrays."""
        return np.subtract(array, other, order="C")  # products with columns in memory order would round differently

    def sums(self, probe: Probe) -> Any:
        """Return an accumulator of the probe's second moments; products by BLAS."""
        if probe.few:
            return Kept(probe)
        return Squares(probe) if probe.alone else Sums(probe)

    def pairs(self, features: int, outputs: int) -> Any:
        """Return an accumulator of products for a fit; products by BLAS."""
        return Pairs(features, outputs)


HOST: Lane = HostLane()


def lane_of(providers: Sequence[str]) -> Lane:
    """Return the lane for these execution providers: on a GPU, torch tensors if possible, else ONNX Runtime values."""
    device = device_of(providers)
    if device.kind == "cpu":
        return HOST
    if why_host(providers):
        from onnxgrail.calibration.devices.values import ValueLane

        return ValueLane(providers)
    from onnxgrail.calibration.devices.tensors import TensorLane

    return TensorLane(device)


def why_host(providers: Sequence[str]) -> str:
    """Return the reason why matrices are solved on the host although models run on a GPU; '' if they are not."""
    device = device_of(providers)
    missing = _missing(device) if device.kind == "cuda" else ""
    return f"{missing}: ONNX Runtime adds up second moments on the GPU, the CPU solves" if missing else ""


def _missing(device: Device) -> str:
    try:
        from onnxgrail.calibration.devices.tensors import sees
    except ImportError:
        return "torch is not installed (pip install 'onnxgrail[torch]')"
    if not sees(device):
        return f"torch does not see {device.place}"
    if not hasattr(runtime().OrtValue, "__dlpack__"):
        return "this ONNX Runtime cannot share tensors with torch (a newer one can)"
    return ""


@contextmanager
def solving_on(providers: Sequence[str]) -> Iterator[None]:
    """Multiply and solve large matrices on the device of the models if possible, else on the host."""
    device = device_of(providers)
    if device.kind == "cpu" or why_host(providers):
        with using(Host(of_solving())):
            yield
        return
    from onnxgrail.calibration.devices.solver import TensorLinear

    with using(TensorLinear(device)):
        yield
