"""Products by ONNX Runtime on the host, where BLAS does not use what the processor has.

OpenBLAS may take a new processor for an old one, or be told to by `OPENBLAS_CORETYPE`.  ONNX Runtime's own kernels look
for themselves: on a Zen 5 whose OpenBLAS keeps to AVX2 they need three quarters of its time for a triangle of width
1536, and six tenths for a product of two matrices.
"""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_info

from onnxgrail import processor
from onnxgrail.algebra import blas
from onnxgrail.algebra.linear import Adder
from onnxgrail.algebra.triangles import panels
from onnxgrail.calibration.kernels import Kernels, product, triangle
from onnxgrail.calibration.session import CPU
from onnxgrail.calibration.threads import of_algebra
from onnxgrail.core import Array

WITH_AVX512 = {"SkylakeX", "Cooperlake", "SapphireRapids"}  # kernels of OpenBLAS
NARROW, WIDE = 192, 1152  # side of a triangle from which on it is worth while, and of one that is cut more coarsely
PANELS = 128, 256  # rows of a triangle that are made together


class RuntimeAdder:
    """Products of float32 rows by ONNX Runtime; what is small, or in float64, by BLAS.

    Args:
        threads: of a product.
    """

    def __init__(self, threads: int) -> None:
        self._kernels = Kernels(CPU, threads)

    def syrk(self, a: Array, c: Array, *, transposed: bool) -> None:
        """C += A Aᵀ, or C += Aᵀ A where `transposed`."""
        width = len(c)
        if transposed or width < NARROW or a.dtype != np.float32 or not a.size:
            blas.syrk(a, c, transposed=transposed)
            return
        rows, lower = PANELS[width >= WIDE], c.T
        found = self._kernels.session(triangle, width, rows).run({"x": np.ascontiguousarray(a.T)})
        for place, part in zip(panels(width, rows), found.values(), strict=True):
            np.add(lower[place], part, out=lower[place])

    def gemm(self, a: Array, b: Array, c: Array) -> None:
        """C += Aᵀ B."""
        if a.dtype != np.float32 or not a.size or not b.size:
            blas.gemm(a, b, c)
            return
        rows = {"a": np.ascontiguousarray(a), "b": np.ascontiguousarray(b)}
        np.add(c, self._kernels.session(product).run(rows)["y"], out=c)


def fastest() -> Adder:
    """Who makes products in the least time."""
    cores = {pool.get("architecture") for pool in threadpool_info() if pool.get("internal_api") == "openblas"}
    left_out = bool(cores) and not cores & WITH_AVX512 and processor.has_avx512(processor.described())
    return RuntimeAdder(of_algebra()) if left_out else blas
