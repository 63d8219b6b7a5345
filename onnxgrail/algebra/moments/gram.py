"""Second moments of a recorded activation: G = sum x xᵀ over its rows, one batch at a time."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.moments.triangles import add_lower, add_squares, mirrored
from onnxgrail.core import Array, Bools, Floats, Probe, Stats
from onnxgrail.errors import DataError

# A float32 batch is summed in float32 where its largest magnitude lies in between: squares neither vanish nor overflow.
SMALLEST, LARGEST = 3e-13, 1e14


def zero_stats(probe: Probe) -> Stats:
    """The `Stats` of no rows at all, for `probe`: the neutral element of `Stats.merge`."""
    return Stats(gram=np.zeros((probe.width, probe.width)), total=np.zeros(probe.width), count=0)


def gram_of(x: Array, probe: Probe, rows: Bools | None = None) -> Stats:
    """Sums over the rows of one batch: G = sum x xᵀ (h, h), s = sum x (h,), n = number of rows.

    See `Sums.add` for what a row is and what is raised.

    References:
        Tang et al. 2026 (GRAIL), arXiv:2602.23795, section 3.2.
    """
    sums = Sums(probe)
    sums.add(x, probe, rows)
    return sums.stats()


class Sums:
    """Second moments of one probe, added up in the order of the calls; owns two triangles that are added to in place.

    Float32 batches go into a float32 triangle, which costs about 1e-6 relative, a thousand times less than the default
    ridge; `take` moves the triangle of a few batches into the float64 one of all.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._single: Array | None = None
        self._double: Array | None = None
        self._total: Floats = np.zeros(probe.width)
        self._count = 0

    def add(self, x: Array, placed: Probe, rows: Bools | None = None) -> None:
        """Add the rows of one batch.

        A row is the vector of the probe's channels at one position of the other axes, uncentred, in unit-major order
        (`placed.index.ravel()`); for a pooled probe each of the m positions of a unit gives a row of its own, so h = u.

        Args:
            x: the activation as recorded, channels on `placed.axis`, any float type.
            placed: the probe, with positions as this tensor has them.
            rows: which rows count (a padding mask), in row-major order over all axes but the channel axis; None for
                all.  Rows that are left out may hold anything, NaN included.

        Raises:
            DataError: if `rows` has another length than the activation has rows, or a value is not finite.
        """
        stack = stacked(x, placed, rows)
        if not stack.size:
            return
        if stack.dtype == np.float32:
            self._single = syrk(stack, self._single)
        else:
            self._double = syrk(stack, self._double)
        self._total = self._total + summed(stack)
        self._count += stack.shape[0] * stack.shape[2]

    def take(self, part: Sums) -> None:
        """Add the sums of `part` in float64 and leave it empty, ready for the next few batches."""
        for triangle in (part._single, part._double):
            if triangle is not None:
                if self._double is None:
                    self._double = triangle.astype(np.float64)
                else:
                    add_lower(self._double.T, triangle.T)
                triangle.fill(0)
        self._total = self._total + part._total
        self._count += part._count
        part._total, part._count = np.zeros_like(part._total), 0

    def drain(self) -> tuple[Floats, Floats, int]:
        """What was taken: (h, h) whose lower triangle counts, `total` (h,) and `count`; then all begins anew."""
        width = self._probe.width
        half = np.zeros((width, width)) if self._double is None else self._double.T
        found = half, self._total, self._count
        self._double, self._total, self._count = None, np.zeros(width), 0
        return found

    def stats(self) -> Stats:
        """The sums so far, in float64.

        Raises:
            DataError: a sum is not finite.
        """
        if self._count == 0:
            return zero_stats(self._probe)
        lower = [t.T.astype(np.float64) for t in (self._single, self._double) if t is not None]
        return stats_of(self._probe, mirrored(sum(lower[1:], lower[0])), self._total, self._count)


class Squares:
    """The diagonal of what `Sums` adds up, at the price of looking at the activations."""

    def __init__(self, probe: Probe) -> None:
        self._squares, self._total = np.zeros((2, probe.width))
        self._count = 0

    def add(self, x: Array, placed: Probe, rows: Bools | None = None) -> None:
        """Add the rows of one batch, see `Sums.add`.

        Raises:
            DataError: `rows` has another length than the activation has rows, or a value is not finite.
        """
        stack = stacked(x, placed, rows)
        if stack.size:
            self._squares += summed(np.square(stack))
            self._total += summed(stack)
            self._count += stack.shape[0] * stack.shape[2]

    def take(self, part: Squares) -> None:
        """Add the sums of `part` and leave it empty."""
        squares, total, count = part.drain()
        self._squares += squares
        self._total += total
        self._count += count

    def drain(self) -> tuple[Floats, Floats, int]:
        """Sums of squares (h,), `total` (h,) and `count`; then all begins anew."""
        found = self._squares, self._total, self._count
        self._squares, self._total = np.zeros((2, len(self._total)))
        self._count = 0
        return found


def stacked(x: Array, placed: Probe, rows: Bools | None) -> Array:
    """The rows of one batch as (l, h, p), see `Sums.add`; in float64 unless their squares can be summed in float32."""
    stack = _stack(x, placed)
    if rows is not None:
        stack = _masked(stack, placed, rows, positions=x.size // x.shape[placed.axis])
    if not stack.size:
        return stack
    peak = max(float(stack.max()), -float(stack.min()))  # NaN where there is one
    if not np.isfinite(peak):
        raise not_finite(int(stack.size - np.isfinite(stack).sum()), stack.size, placed)
    fits = stack.dtype == np.float32 and (peak == 0.0 or SMALLEST < peak < LARGEST)
    return stack if fits else stack.astype(np.float64, copy=False)


def summed(stack: Array) -> Array:
    """(h,) sums over the rows of a stack (l, h, p)."""
    sums = stack.sum(axis=2) if stack.shape[2] > 1 else stack[:, :, 0]
    return np.asarray(np.ones(len(sums), sums.dtype) @ sums)


def stats_of(probe: Probe, gram: Floats, total: Floats, count: int) -> Stats:
    """Finished sums: all of G (h, h), or its diagonal (h,), s (h,) and the number of rows.

    Raises:
        DataError: one is not finite.
    """
    found = Stats(gram=gram, total=total, count=count)
    # By Cauchy and Schwarz nothing is larger than the diagonal.
    if not (np.isfinite(found.squares).all() and np.isfinite(total).all()):
        fault = f"second moments of activation {probe.value!r} overflow"
        raise DataError(fault, hint="Check the scale of the calibration data.")
    return found


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
        raise wrong_mask(flat.size, positions, probe)
    lead, width, _ = stack.shape
    if lead == positions:
        return stack[flat]
    # Locations are split between the leading and the trailing axes: bring both in front of the channels.
    members = probe.index.size // width
    split = stack.reshape(lead, width, members, positions // max(lead, 1))
    return split.transpose(0, 3, 1, 2).reshape(positions, width, members)[flat]


def syrk(stack: Array, gram: Array | None) -> Array:
    """Upper triangle of gram + sum over l and t of stack[l, :, t] stack[l, :, t]ᵀ, in place, in the stack's dtype.

    What comes to stand below it means nothing.

    Args:
        stack: (l, h, p) rows of l locations.
        gram: (h, h), None for zero.
    """
    locations, width, samples = stack.shape
    if gram is None:
        gram = np.zeros((width, width), stack.dtype, order="F")  # as BLAS wants it
    if samples < width:
        # Many small products waste BLAS (measured: C = 2048 at 7 x 7 is 2.4 times slower); one copy and one product.
        flat = np.ascontiguousarray(stack.transpose(0, 2, 1)).reshape(locations * samples, width)
        add_squares(gram.T, flat)
        return gram
    for matrix in stack:
        add_squares(gram.T, matrix.T)  # a view: no copy for the wide early stages of a convolutional net
    return gram


def not_finite(bad: int, size: int, probe: Probe) -> DataError:
    """What to tell somebody whose activations cannot be summed."""
    fault = f"{bad} of {size} values of activation {probe.value!r} are NaN or infinite"
    return DataError(fault, hint="Check the calibration data, or use a float32 copy of a half precision model.")


def wrong_mask(entries: int, positions: int, probe: Probe) -> DataError:
    """What to tell somebody whose mask belongs to another activation."""
    fault = f"the row mask has {entries} entries but activation {probe.value!r} has {positions} rows"
    return DataError(fault, hint="Give a mask with the batch and sequence axes of the activation, or none.")
