"""Products and solutions with large matrices on a device, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onnxgrail.algebra.solve.linear import HOST, Factor
from onnxgrail.calibration.runtime.provider import room_for
from onnxgrail.core import Floats, Ints
from onnxgrail.machine.device import Device

SIDE = 1024  # smaller matrices: copies to the device and back cost more than they save


class TensorLinear:
    """Linear algebra on a device, like `algebra.solve.linear.Host`.

    Matrices that are small, or too large for the free memory of the device, are handled on the host.
    """

    def __init__(self, device: Device, side: int = SIDE) -> None:
        self._device, self._side = device, side

    def product(self, left: Floats, right: Floats) -> Floats:
        """Return the product of two matrices."""
        if min(*left.shape, right.shape[1]) < self._side:
            return HOST.product(left, right)
        return room_for(
            lambda: _back(self._there(left) @ self._there(right)),
            lambda: HOST.product(left, right),
        )

    def squares(self, rows: Floats) -> Floats:
        """Return Z Zᵀ of a matrix Z."""
        return self.product(rows, rows.T)

    def picked(self, matrix: Floats, rows: Ints, columns: Ints) -> Floats:
        """Return the given rows and columns of a matrix, in this order."""
        return HOST.picked(matrix, rows, columns)

    def cholesky(self, matrix: Floats) -> Factor:
        """Return the Cholesky factor of a symmetric matrix; it stays on the device."""
        if len(matrix) < self._side:
            return HOST.cholesky(matrix)
        return room_for(lambda: self._factor(matrix), lambda: HOST.cholesky(matrix))

    def inverse(self, matrix: Floats) -> Floats:
        """Return the inverse (h, h) of a positive definite matrix."""
        if len(matrix) < self._side:
            return HOST.inverse(matrix)
        found = room_for(lambda: _back(torch.cholesky_inverse(self._lower(matrix))), lambda: HOST.inverse(matrix))
        if not np.isfinite(found).all():
            raise np.linalg.LinAlgError("not finite")
        return found

    def _factor(self, matrix: Floats) -> Factor:
        lower = self._lower(matrix)

        def solve(rhs: Floats) -> Floats:
            right = rhs if rhs.ndim == 2 else rhs[:, None]
            return room_for(
                lambda: _back(torch.cholesky_solve(self._there(right), lower)).reshape(rhs.shape),
                lambda: HOST.factor(_back(lower)).solve(rhs),
            )

        return Factor(_back(lower.diagonal()), solve)

    def _lower(self, matrix: Floats) -> Any:
        """Return the Cholesky factor, on the device."""
        lower, fault = torch.linalg.cholesky_ex(self._there(matrix))
        if int(fault):
            raise np.linalg.LinAlgError(f"the leading minor of order {int(fault)} is not positive definite")
        return lower

    def _there(self, array: Floats) -> Any:
        return torch.tensor(np.asarray(array, np.float64), device=self._device.place)


def _back(array: Any) -> Floats:
    return np.asarray(array.cpu().numpy())
