"""Where activations lie between runs, and who adds up their second moments: the host, torch or ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from onnxgrail.algebra.moments.gram import Squares, Sums
from onnxgrail.algebra.solve.linear import Host, using
from onnxgrail.calibration.runtime.session import Session, runtime
from onnxgrail.calibration.runtime.threads import of_solving
from onnxgrail.core import Array, Bools, Feed, Probe
from onnxgrail.machine.device import Device, device_of


class Lane(Protocol):
    """What a stream does with activations, which nobody else looks into.

    Attributes:
        room: bytes of activations that may be kept on the device.
        whole: the sums of all batches of a process are one partial sum, since bringing each to the host costs much.
    """

    room: int
    whole: bool

    def run(self, session: Session, feed: Feed) -> dict[str, Array]:
        """Outputs by name; what is to stay for long must be `kept`."""

    def kept(self, array: Array, room: int) -> Array:
        """The array for later: on the device where it takes no more than `room` bytes, else on the host."""

    def size(self, array: Array) -> int:
        """Bytes on the device."""

    def host(self, array: Array) -> Array:
        """The array on the host."""

    def compress(self, stays: Bools, array: Array, axis: int) -> Array:
        """Some of the positions of an axis."""

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Arrays behind each other."""

    def sums(self, probe: Probe) -> Any:
        """Second moments of a probe, with the methods of `Sums` that add up and hand over."""


class HostLane:
    """NumPy."""

    room, whole = 0, False

    def run(self, session: Session, feed: Feed) -> dict[str, Array]:
        """Outputs by name."""
        return session.run(feed)

    def kept(self, array: Array, room: int) -> Array:  # noqa: ARG002  as the protocol says
        """The array."""
        return array

    def size(self, array: Array) -> int:  # noqa: ARG002
        """None of it is on a device."""
        return 0

    def host(self, array: Array) -> Array:
        """The array."""
        return array

    def compress(self, stays: Bools, array: Array, axis: int) -> Array:
        """Some of the positions of an axis."""
        return np.compress(stays, array, axis=axis)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Arrays behind each other."""
        return np.concatenate(arrays, axis=axis)

    def sums(self, probe: Probe) -> Sums | Squares:
        """Second moments of a probe; products by BLAS."""
        return Squares(probe) if probe.alone else Sums(probe)


HOST: Lane = HostLane()


def lane_of(providers: Sequence[str]) -> Lane:
    """The lane for these execution providers: on a GPU tensors of torch, or what ONNX Runtime itself can do there."""
    device = device_of(providers)
    if device.kind == "cpu":
        return HOST
    if why_host(providers):
        from onnxgrail.calibration.devices.values import ValueLane

        return ValueLane(providers)
    from onnxgrail.calibration.devices.tensors import TensorLane

    return TensorLane(device)


def why_host(providers: Sequence[str]) -> str:
    """Why matrices are solved on the host although models run on a GPU; '' where that is not so."""
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
    """Have large matrices multiplied and solved where models run, or else on the host."""
    device = device_of(providers)
    if device.kind == "cpu" or why_host(providers):
        with using(Host(of_solving())):
            yield
        return
    from onnxgrail.calibration.devices.solver import TensorLinear

    with using(TensorLinear(device)):
        yield
