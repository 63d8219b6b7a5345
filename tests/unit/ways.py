"""The ways over a device, taken on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrail.calibration.devices.lanes import Lane
from onnxgrail.calibration.devices.values import Held, ValueLane
from onnxgrail.core import Array
from onnxgrail.machine.device import Device


class Values:
    """ONNX Runtime by itself."""

    def lane(self, room: int = 2**30) -> Lane:
        return ValueLane(room=room)

    def there(self, array: Array) -> Any:
        """An array on the device."""
        owned = np.array(array, order="C")
        return Held(ort.OrtValue.ortvalue_from_numpy(owned), owned.shape, owned.dtype)

    def is_there(self, array: Any) -> bool:
        return isinstance(array, Held)


class Tensors:
    """Torch."""

    def lane(self, room: int = 2**30) -> Lane:
        from onnxgrail.calibration.devices.tensors import TensorLane

        return TensorLane(Device(memory=room))

    def there(self, array: Array) -> Any:
        """An array on the device."""
        import torch

        return torch.tensor(array)

    def is_there(self, array: Any) -> bool:
        import torch

        return torch.is_tensor(array)


Way = Values | Tensors
TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
every_way = pytest.mark.parametrize(
    "way", [pytest.param(Values(), id="values"), pytest.param(Tensors(), id="tensors", marks=TORCH)]
)
