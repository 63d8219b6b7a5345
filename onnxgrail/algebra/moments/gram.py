"""Second moments of a recorded activation: G = sum x xᵀ over its rows, one batch at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrail.algebra.moments.triangles import add_squares, length, unpacked
from onnxgrail.algebra.moments.waiting import Waiting
from onnxgrail.core import Array, Bools, Floats, Probe, Stats
from onnxgrail.errors import DataError

# A float32 batch is summed in float32 if its largest magnitude is in this range: squares neither vanish nor overflow.
SMALLEST, LARGEST = 3e-13, 1e14


def zero_stats(probe: Probe) -> Stats:
    """Return the `Stats` of zero rows for `probe`."""
    return Stats(gram=np.zeros((probe.width, probe.width)), total=np.zeros(probe.width), count=0)


class Sums:
    """Second moments of one probe, added in the order of the calls to triangles that are updated in place.

    Float32 batches are added to a float32 triangle, which costs about 1e-6 relative, a thousand times less than the
    default ridge; `take` adds the triangles of a few batches each, in float64 unless they have several panels.

    Attributes:
        count: number of rows.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._waiting = Waiting()
        self._single: Array | None = None
        self._double: Array | None = None
        self._taken: Array | None = None  # sum of the triangles of other accumulators
        self._total: Floats = np.zeros(probe.width)
        self.count = 0

    def add(self, x: Array, placed: Probe, rows: Bools | None = None) -> None:
        """Add the rows of one batch.

        A row is the vector of the probe's channels at one position of the other axes, uncentered, in unit-major order
        (`placed.index.ravel()`). For a pooled probe each of the m positions of a unit gives a separate row, so h = u.

        Args:
            x: the recorded activation, channels on `placed.axis`, any float type.
            placed: the probe, with positions as this tensor has them.
            rows: mask of the rows that count (not padding), in row-major order over all axes but the channel axis; None
                for all. Other rows may hold anything, NaN included.

        Raises:
            DataError: `rows` has another length than the activation has rows, or a value is not finite.
        """
        stack = stacked(x, placed, rows)
        if not stack.size:
            return
        if stack.dtype != np.float32:
            self._double = syrk(stack, self._double)
        elif stack.shape[2] < stack.shape[1]:
            self._multiply(self._waiting.add(flat(stack)))
        else:
            self._single = syrk(stack, self._single)
        self._total = self._total + summed(stack)
        self.count += stack.shape[0] * stack.shape[2]

    def _multiply(self, ready: tuple[Array, ...]) -> None:
        for rows in ready:
            self._single = add_squares(self._single, rows)

    def take(self, part: Sums) -> None:
        """Add the sums of `part` and empty it, ready for the next few batches."""
        part._multiply(part._waiting.all())
        for triangle in (part._single, part._double):
            if triangle is not None:
                several = len(triangle) < self._probe.width**2
                part_sum = triangle if several else triangle.astype(np.float64, copy=False)
                self._taken = part_sum if self._taken is None else plus(self._taken, part_sum)
        part._single = part._double = None
        self._total = self._total + part._total
        self.count += part.count
        part._total, part.count = np.zeros_like(part._total), 0

    def drain(self) -> tuple[Array, Floats, int]:
        """Return what was taken, and reset the sums.

        Returns:
            The triangle; `total` (h,); `count`.
        """
        half = np.zeros(length(self._probe.width)) if self._taken is None else self._taken
        found = half, self._total, self.count
        self._taken, self._total, self.count = None, np.zeros(self._probe.width), 0
        return found

    def stats(self) -> Stats:
        """Return the sums so far, in float64.

        Raises:
            DataError: a sum is not finite.
        """
        if self.count == 0:
            return zero_stats(self._probe)
        self._multiply(self._waiting.all())
        parts = [t.astype(np.float64) for t in (self._taken, self._single, self._double) if t is not None]
        return stats_of(self._probe, unpacked(sum(parts[1:], parts[0]), self._probe.width), self._total, self.count)


class Squares:
    """The diagonal of `Sums` and the totals, without the cost of a matrix product."""

    def __init__(self, probe: Probe) -> None:
        self._squares, self._total = np.zeros((2, probe.width))
        self.count = 0

    def add(self, x: Array, placed: Probe, rows: Bools | None = None) -> None:
        """Add the rows of one batch, see `Sums.add`.

        Raises:
            DataError: `rows` has another length than the activation has rows, or a value is not finite.
        """
        self._include(stacked(x, placed, rows))

    def _include(self, stack: Array) -> None:
        if stack.size:
            self._squares += summed(np.square(stack))
            self._total += summed(stack)
            self.count += stack.shape[0] * stack.shape[2]

    def take(self, part: Squares) -> None:
        """Add the sums of `part` and empty it."""
        squares, total, count = part.drain()[:3]
        self._squares += squares
        self._total += total
        self.count += count

    def drain(self) -> tuple[Any, ...]:
        """Return sums of squares (h,), `total` (h,) and `count`, and reset the sums."""
        found = self._squares, self._total, self.count
        self._squares, self._total = np.zeros((2, len(self._total)))
        self.count = 0
        return found


class Kept(Squares):
    """Sums like `Squares`, and the rows themselves in float32, for activations of few rows."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._rows: list[Array] = []

    def _include(self, stack: Array) -> None:
        super()._include(stack)
        self._rows.append(stack.transpose(0, 2, 1).astype(np.float32, copy=False).reshape(-1))

    def take(self, part: Squares) -> None:
        """Add the sums and the rows of `part` and empty it."""
        if isinstance(part, Kept):
            self._rows += part._rows
        super().take(part)

    def drain(self) -> tuple[Any, ...]:
        """Return what `Squares` returns and the rows as bytes, which a tally appends, and reset all."""
        rows, self._rows = self._rows, []
        return *super().drain(), np.concatenate([*rows, np.empty(0, np.float32)]).view(np.uint8)


def stacked(x: Array, placed: Probe, rows: Bools | None) -> Array:
    """Return the rows of one batch as (l, h, p), see `Sums.add`; float64 unless squares can be summed in float32."""
    stack = _stack(x, placed)
    if rows is not None:
        stack = _masked(stack, placed, rows, positions=x.size // x.shape[placed.axis])
    if not stack.size:
        return stack
    peak = max(float(stack.max()), -float(stack.min()))  # NaN if a value is NaN
    if not np.isfinite(peak):
        raise not_finite(int(stack.size - np.isfinite(stack).sum()), stack.size, placed)
    fits = stack.dtype == np.float32 and (peak == 0.0 or SMALLEST < peak < LARGEST)
    return stack if fits else stack.astype(np.float64, copy=False)


def summed(stack: Array) -> Array:
    """Compute (h,) sums over the rows of a stack (l, h, p)."""
    sums = stack.sum(axis=2) if stack.shape[2] > 1 else stack[:, :, 0]
    return np.asarray(np.ones(len(sums), sums.dtype) @ sums)


def stats_of(probe: Probe, gram: Floats, total: Floats, count: int, rows: Array | None = None) -> Stats:
    """Return finished sums as `Stats`.

    Args:
        probe: the probe, for the error message.
        gram: all of G (h, h), or its diagonal (h,).
        total: (h,) sums of the features.
        count: number of rows.
        rows: the bytes of the rows, if they are few.

    Raises:
        DataError: a sum is not finite.
    """
    kept = None if rows is None else rows.view(np.float32).reshape(-1, probe.width)
    if kept is not None and not SMALLEST**2 < gram.max() < LARGEST**2:
        kept = kept.astype(np.float64)
    found = Stats(gram=gram, total=total, count=count, rows=kept)
    # By the Cauchy-Schwarz inequality the diagonal bounds all elements.
    if not (np.isfinite(found.squares).all() and np.isfinite(total).all()):
        fault = f"second moments of activation {probe.value!r} overflow"
        raise DataError(fault, hint="Check the scale of the calibration data.")
    return found


def _stack(x: Array, probe: Probe) -> Array:
    """Return the probe's channels as (l, h, p): row t of location l is the vector [l, :, t]. A view if possible."""
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
    """Return the chosen rows of a stack (n, h, p); a row of a pooled probe includes its m samples."""
    flat = rows.ravel()
    if flat.size != positions:
        raise wrong_mask(flat.size, positions, probe)
    lead, width, _ = stack.shape
    if lead == positions:
        return stack[flat]
    # Locations are split between the leading and the trailing axes: move both before the channels.
    members = probe.index.size // width
    split = stack.reshape(lead, width, members, positions // max(lead, 1))
    return split.transpose(0, 3, 1, 2).reshape(positions, width, members)[flat]


def syrk(stack: Array, gram: Array | None) -> Array:
    """Add the sum over l and t of stack[l, :, t] stack[l, :, t]ᵀ (h, h) to a triangle in place, and return it.

    Args:
        stack: (l, h, p) rows of l locations.
        gram: the triangle in the stack's dtype, None for zero.
    """
    _, width, samples = stack.shape
    if samples < width:
        return add_squares(gram, flat(stack))
    for matrix in stack:
        gram = add_squares(gram, matrix.T)  # a view: no copy for the wide early stages of a convolutional net
    assert gram is not None, "an empty stack"
    return gram


def flat(stack: Array) -> Array:
    """Return a stack (l, h, p) as rows (l · p, h), because many small products would waste BLAS.

    Measured: with 2048 channels at 7 x 7 positions they take 2.4 times as long as one copy and one product.
    """
    return np.ascontiguousarray(stack.transpose(0, 2, 1)).reshape(-1, stack.shape[1])


def plus(total: Array, part: Array) -> Array:
    """Return the sum of two arrays, in place if they have the same type."""
    return np.add(total, part, out=total if total.dtype == part.dtype else None)


def not_finite(bad: int, size: int, probe: Probe) -> DataError:
    """Return the error for activations that cannot be summed."""
    fault = f"{bad} of {size} values of activation {probe.value!r} are NaN or infinite"
    return DataError(fault, hint="Check the calibration data, or use a float32 copy of a half precision model.")


def wrong_mask(entries: int, positions: int, probe: Probe) -> DataError:
    """Return the error for a mask that does not fit the activation."""
    fault = f"the row mask has {entries} entries but activation {probe.value!r} has {positions} rows"
    return DataError(fault, hint="Give a mask with the batch and sequence axes of the activation, or none.")
