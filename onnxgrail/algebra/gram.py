"""Second moments of a recorded activation: G = sum x xᵀ over its rows, one batch at a time."""

from __future__ import annotations

import numpy as np
from scipy.linalg import blas

from onnxgrail.core import Array, Bools, Probe, Stats
from onnxgrail.errors import DataError

SMALLEST = 1e-25  # largest float32 second moment below which its squares have begun to vanish


def zero_stats(probe: Probe) -> Stats:
    """The `Stats` of no rows at all, for `probe`: the neutral element of `Stats.merge`."""
    return Stats(gram=np.zeros((probe.width, probe.width)), total=np.zeros(probe.width), count=0)


def gram_of(x: Array, probe: Probe, rows: Bools | None = None) -> Stats:
    """Sums over the rows of one batch: G = sum x xᵀ (h, h), s = sum x (h,), n = number of rows.

    A row is the vector of the probe's channels at one position of the other axes, uncentred, in unit-major order
    (`probe.index.ravel()`); for a pooled probe each of the m positions of a unit gives a row of its own, so h = u.

    Args:
        x: the activation as recorded, channels on `probe.axis`, any float type.
        probe: which channels, and whether its positions are samples.
        rows: which rows count (a padding mask), in row-major order over all axes but the channel axis; None for all.
            Rows that are left out may hold anything, NaN included.

    Returns:
        Float64 sums.  A float32 or float16 batch is summed in float32, which costs about 1e-6 relative, a thousand
        times less than the default ridge, and falls back to float64 where the sums leave float32's range.

    Raises:
        DataError: if `rows` has another length than the activation has rows, or a sum is not finite.

    References:
        Tang et al. 2026 (GRAIL), arXiv:2602.23795, section 3.2.
    """
    stack = _stack(x, probe)
    if rows is not None:
        stack = _masked(stack, probe, rows, positions=x.size // x.shape[probe.axis])
    count = stack.shape[0] * stack.shape[2]
    if count == 0:
        return zero_stats(probe)
    gram = _syrk(stack)
    # Squares of finite float32 values can leave its range on either side; float64 then has room.
    if stack.dtype == np.float32 and not _in_range(gram, stack):
        gram = _syrk(stack.astype(np.float64))
    total = stack.sum(axis=(0, 2), dtype=np.float64)
    if not (np.isfinite(gram).all() and np.isfinite(total).all()):
        raise _not_finite(stack, probe)
    full = np.add(gram, gram.T, dtype=np.float64)  # BLAS filled the upper triangle, the lower one is zero
    np.fill_diagonal(full, gram.diagonal())
    return Stats(gram=full, total=total, count=count)


def _stack(x: Array, probe: Probe) -> Array:
    """The probe's channels as (l, h, p): row t of location l is the vector [l, :, t].  A view of `x` where possible."""
    values = x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)
    channels = values.shape[probe.axis]
    lead = int(np.prod(values.shape[: probe.axis], dtype=np.int64))
    trail = int(np.prod(values.shape[probe.axis + 1 :], dtype=np.int64))
    values = values.reshape(lead, channels, trail)
    # Reading every channel in order needs no gather, which would copy the whole activation.
    if not np.array_equal(probe.index.ravel(), np.arange(channels)):
        values = values[:, probe.index.ravel(), :]
    return values.reshape(lead, probe.width, probe.index.size // probe.width * trail)


def _masked(stack: Array, probe: Probe, rows: Bools, positions: int) -> Array:
    """The stack (n, h, p) with only the chosen rows; a row of a pooled probe takes its m samples along."""
    flat = rows.ravel()
    if flat.size != positions:
        raise DataError(
            f"the row mask has {flat.size} entries but activation {probe.value!r} has {positions} rows",
            hint="Give a mask with the batch and sequence axes of the activation, or none.",
        )
    lead, width, _ = stack.shape
    if lead == positions:
        return stack[flat]
    # Locations are split between the leading and the trailing axes: bring both in front of the channels.
    members = probe.index.size // width
    split = stack.reshape(lead, width, members, positions // max(lead, 1))
    return split.transpose(0, 3, 1, 2).reshape(positions, width, members)[flat]


def _syrk(stack: Array) -> Array:
    """Upper triangle of sum over l and t of stack[l, :, t] stack[l, :, t]ᵀ, in the dtype of `stack`."""
    locations, width, samples = stack.shape
    syrk = blas.ssyrk if stack.dtype == np.float32 else blas.dsyrk
    gram = np.zeros((width, width), stack.dtype, order="F")  # Fortran order lets BLAS add in place
    if samples < width:
        # Many small products waste BLAS (measured: C = 2048 at 7 x 7 is 2.4 times slower); one copy and one product.
        flat = np.ascontiguousarray(stack.transpose(0, 2, 1)).reshape(locations * samples, width)
        return np.asarray(syrk(1.0, flat.T, c=gram, overwrite_c=1))
    for matrix in stack:
        # (h, p) in C order is a (p, h) matrix to Fortran: no copy for the wide early stages of a convolutional net.
        gram = syrk(1.0, matrix.T, beta=1.0, c=gram, trans=1, overwrite_c=1)
    return np.asarray(gram)


def _in_range(gram: Array, stack: Array) -> bool:
    """Whether float32 sums neither overflowed nor underflowed (their squares would then have lost digits)."""
    largest = float(np.diagonal(gram).max(initial=0.0))
    return bool(np.isfinite(gram).all()) and (largest > SMALLEST or not stack.any())


def _not_finite(stack: Array, probe: Probe) -> DataError:
    """What to tell somebody whose activations cannot be summed."""
    bad = int(stack.size - np.isfinite(stack).sum())
    if bad:
        fault = f"{bad} of {stack.size} values of activation {probe.value!r} are NaN or infinite"
        return DataError(fault, hint="Check the calibration data, or use a float32 copy of a half precision model.")
    fault = f"second moments of activation {probe.value!r} overflow"
    return DataError(fault, hint="Check the scale of the calibration data.")
