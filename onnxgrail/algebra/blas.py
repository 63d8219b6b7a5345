"""What threads do side by side: products that are added to what is there, and solutions, by SciPy's BLAS and LAPACK.

`scipy.linalg.blas` holds Python's lock during a product, so that threads wait for each other.  The same functions,
taken from where SciPy offers them to compiled code, let the others go on.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

from onnxgrail.core import Array, Floats

NO, YES = b"N", b"T"


def syrk(a: Array, c: Array, *, transposed: bool) -> None:
    """C += A Aᵀ, or C += Aᵀ A where `transposed`: the upper triangle only, in place.

    Args:
        a: A (n, k), or (k, n) where `transposed`, in float32 or float64; copied unless its columns lie one after the
            other (Fortran order).
        c: C (n, n), of the same type and in Fortran order.
        transposed: which of the two.
    """
    a = np.asfortranarray(a)
    n, k = a.shape[::-1] if transposed else a.shape
    _check(c, (n, n), a.dtype)
    if not a.size:
        return
    name = "ssyrk" if a.dtype == np.float32 else "dsyrk"
    one = _number(a.dtype)
    _call(name, b"U", YES if transposed else NO, n, k, one, a, a.shape[0], one, c, n)


def gemm(a: Array, b: Array, c: Array) -> None:
    """C += Aᵀ B, in place.

    Args:
        a: A (k, m), in float32 or float64; copied unless its rows lie one after the other (C order).
        b: B (k, n), likewise.
        c: C (m, n), of the same type and in C order.
    """
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    (k, m), n = a.shape, b.shape[1]
    _check(c.T, (n, m), a.dtype)
    if not k * m * n:
        return
    name = "sgemm" if a.dtype == np.float32 else "dgemm"
    one = _number(a.dtype)
    # To Fortran all three are transposed: Cᵀ += Bᵀ A.
    _call(name, NO, YES, n, m, k, one, b, n, a, m, one, c, n)


def substitute(factor: Floats, rhs: Floats) -> None:
    """B := A⁻¹ B, in place.

    Args:
        factor: L (n, n) of A = L Lᵀ, in Fortran order.
        rhs: B (n, k), likewise.
    """
    n, k = rhs.shape
    _check(factor, (n, n), np.float64)
    _check(rhs, (n, k), np.float64)
    if n * k:
        _call("dpotrs", b"L", n, k, factor, n, rhs, n, 0)


def factorise(matrix: Floats) -> None:
    """A := L of A = L Lᵀ, in place; what lies above the diagonal is left alone and means nothing.

    Args:
        matrix: A (n, n), or a part of a larger one, in Fortran order.

    Raises:
        LinAlgError: where it is not positive definite.
    """
    fault = ctypes.c_int(0)
    if len(matrix):
        _call("dpotrf", b"L", len(matrix), matrix, _leading(matrix), fault)
    if fault.value:
        raise np.linalg.LinAlgError(f"the leading minor of order {fault.value} is not positive definite")


def divide(side: Floats, factor: Floats) -> None:
    """B := B L⁻ᵀ, in place, for B (m, n) and L (n, n), which may be parts of larger ones in Fortran order."""
    m, n = side.shape
    one = _number(np.float64)
    if m * n:
        _call("dtrsm", b"R", b"L", YES, NO, m, n, one, factor, _leading(factor), side, _leading(side))


def deduct(left: Floats, right: Floats, c: Floats) -> None:
    """C -= A Bᵀ, in place, for A (m, k) and B (n, k), all of which may be parts of larger ones in Fortran order."""
    (m, n), k = c.shape, left.shape[1]
    one = _number(np.float64)
    sizes = [_leading(array) for array in (left, right, c)]
    if m * n * k:
        minus = ctypes.c_double(-1.0)
        _call("dgemm", NO, YES, m, n, k, minus, left, sizes[0], right, sizes[1], one, c, sizes[2])


def _leading(array: Floats) -> int:
    """How far one column lies from the next."""
    down, along = array.strides
    if array.dtype != np.float64 or down != array.itemsize or along % down or along < down * len(array):
        raise ValueError(f"cannot work on {array.dtype} {array.shape} with strides {array.strides}")
    return along // down


def _check(c: Array, shape: tuple[int, int], dtype: Any) -> None:
    if c.shape != shape or c.dtype != dtype or not c.flags.f_contiguous or not c.flags.writeable:
        raise ValueError(f"cannot add {dtype} {shape} to {c.dtype} {c.shape}")


def _number(dtype: Any) -> Any:
    return ctypes.c_float(1.0) if dtype == np.float32 else ctypes.c_double(1.0)


def _call(name: str, *arguments: Any) -> None:
    """Call a function; Fortran wants the address of everything."""
    _function(name, len(arguments))(*(_address(value) for value in arguments))


def _address(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, bytes):
        return ctypes.c_char_p(value)
    return ctypes.byref(ctypes.c_int(value) if isinstance(value, int) else value)


@functools.cache
def _function(name: str, count: int) -> Callable[..., None]:
    """The function behind the capsule that compiled code would read."""
    module = cython_blas if name in cython_blas.__pyx_capi__ else cython_lapack
    capsule = ctypes.py_object(module.__pyx_capi__[name])
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count)
    return found(get_pointer(capsule, get_name(capsule)))  # type: ignore[no-any-return]
