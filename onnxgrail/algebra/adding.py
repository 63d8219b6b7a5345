"""Products of float rows that are added to what is there, by BLAS or by whatever `adding_by` puts in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from onnxgrail.algebra import blas
from onnxgrail.core import Array


class Adder(Protocol):
    """Adds products in place, in float32 or float64; arrays as in `onnxgrail.algebra.blas`."""

    def syrk(self, a: Array, c: Array, *, transposed: bool) -> None:
        """C += A Aᵀ, or C += Aᵀ A where `transposed`: the upper triangle; what is below it means nothing."""

    def gemm(self, a: Array, b: Array, c: Array) -> None:
        """C += Aᵀ B."""


class Blas:
    """SciPy's."""

    def syrk(self, a: Array, c: Array, *, transposed: bool) -> None:
        """C += A Aᵀ, or C += Aᵀ A where `transposed`."""
        blas.syrk(a, c, transposed=transposed)

    def gemm(self, a: Array, b: Array, c: Array) -> None:
        """C += Aᵀ B."""
        blas.gemm(a, b, c)


BLAS: Adder = Blas()
_chosen: ContextVar[Adder] = ContextVar("adder", default=BLAS)


@contextmanager
def adding_by(adder: Adder) -> Iterator[None]:
    """Have another one add within a with-block."""
    token = _chosen.set(adder)
    try:
        yield
    finally:
        _chosen.reset(token)


def adder() -> Adder:
    """What adds now."""
    return _chosen.get()
