"""Activations in the memory of ONNX Runtime and their sums, computed by ONNX Runtime: for a GPU without torch.

Small graphs from `kernels` read the network's outputs.  The same code runs and is tested on a CPU; only names differ on
a GPU.  Every run waits for its outputs, so runs cannot overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.algebra.moments.gram import LARGEST, SMALLEST, Squares, Sums, wrong_mask
from onnxgrail.algebra.moments.triangles import packed
from onnxgrail.calibration.devices.kernels import Kernels, Rows, copying, joining, moments, picking, widening
from onnxgrail.calibration.devices.lanes import HOST, HostLane
from onnxgrail.calibration.runtime.provider import room_for
from onnxgrail.calibration.runtime.session import CPU, Session
from onnxgrail.core import Array, Bools, Feed, Floats, Probe
from onnxgrail.graph.io.running.widen import wide
from onnxgrail.machine.device import device_of

FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
WORDS = {np.dtype(kind): word for word, kind in FLOATS.items()}
OTHERS = frozenset(f"tensor({name})" for name in ("bool", "int64", "int32", "uint8", "int8"))  # stay on the host
ROOM = 2**31  # bytes of cached activations on a GPU, whose free memory ONNX Runtime does not report


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """An array in memory of ONNX Runtime.

    Attributes:
        value: its OrtValue.
        shape: sizes of its axes.
        dtype: its NumPy dtype.
    """

    value: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class ValueLane(HostLane):
    """A lane that keeps floating-point activations in memory of ONNX Runtime on a device.

    Integers and booleans, which are small and determine shapes, stay on the host.  So do the rows for fits.
    """

    whole = True

    def __init__(self, providers: Sequence[str] = CPU, room: int | None = None) -> None:
        self._device = device_of(providers)
        self._kernels = Kernels(providers)
        self.room = (self._device.memory or ROOM) if room is None else room

    def run(self, session: Session, feed: Feed) -> dict[str, Array]:
        """Run a session; return its outputs by name.

        Floating-point outputs borrow memory of the session, which it can use again when they are released.
        """
        there, made = ends(session, feed)
        if not fits(there, made, lambda array: isinstance(array, Held)):
            return session.run({name: self.host(array) for name, array in there.items()})
        found = self.bound(session, there, [n for n, kind in made.items() if kind in FLOATS])
        return found | handed_on(session, there)

    def bound(self, session: Session, feed: Feed, stay: Collection[str]) -> dict[str, Any]:
        """Run a session with inputs on device or host; return outputs by name, those in `stay` on the device."""
        names = [name for name in session.output_names if name not in session.inputs]
        values = session.run_bound(feed, self._binder(session, feed, names, stay)) if names else []
        return {n: _held(value) if n in stay else _copied(value) for n, value in zip(names, values, strict=True)}

    def _binder(
        self, session: Session, feed: Feed, names: Sequence[str], stay: Collection[str]
    ) -> Callable[[Any], None]:
        """Return a function that binds inputs to their memory and outputs to their device."""
        kind, number = self._device.kind, self._device.number

        def bind(binding: Any) -> None:
            for name in session.inputs:
                array: Any = feed[name]
                if isinstance(array, Held):
                    binding.bind_ortvalue_input(name, array.value)
                else:
                    binding.bind_cpu_input(name, np.asarray(wide(array), order="C"))
            for name in names:
                binding.bind_output(name, *((kind, number) if name in stay else ("cpu", 0)))

        return bind

    def call(self, make: Callable[..., bytes], choices: Sequence[Any], feed: Feed) -> Any:
        """Run a small graph with one output; return the output, which stays on the device."""
        session = self._kernels.session(make, *choices)
        (name,) = session.output_names
        return self.bound(session, feed, [name])[name]

    def kept(self, array: Any, room: int) -> Any:
        """Return a copy for later use, so that borrowed memory can be released."""
        if not isinstance(array, Held) or array.nbytes > room:
            return self.host(array)
        choices, feed = [WORDS[array.dtype]], dict[str, Any](x=array)
        return room_for(lambda: self.call(copying, choices, feed), lambda: self.host(array))

    def size(self, array: Any) -> int:
        """Return the bytes on the device."""
        return array.nbytes if isinstance(array, Held) else 0

    def host(self, array: Any) -> Any:
        """Return the array on the host, copied if it is on the device."""
        return _copied(array.value) if isinstance(array, Held) else array

    def compress(self, stays: Bools, array: Any, axis: int) -> Any:
        """Return the positions of an axis that `stays` selects."""

        def here() -> Array:
            return HOST.compress(stays, self.host(array), axis)

        def there() -> Any:
            return self.call(picking, [WORDS[array.dtype], axis], {"x": array, "index": np.flatnonzero(stays)})

        return room_for(there, here) if isinstance(array, Held) else here()

    def concatenate(self, arrays: Sequence[Any], axis: int) -> Any:
        """Return the concatenated arrays."""

        def here() -> Array:
            return HOST.concatenate([self.host(array) for array in arrays], axis)

        def there() -> Any:
            feed = {f"x{number}": array for number, array in enumerate(arrays)}
            return self.call(joining, [WORDS[arrays[0].dtype], axis, len(arrays)], feed)

        return room_for(there, here) if all(isinstance(array, Held) for array in arrays) else here()

    def sums(self, probe: Probe) -> ValueSums:
        """Return an accumulator of the probe's second moments on the device."""
        return ValueSums(probe, self)

    def moments(self, rows: Rows, feed: Feed) -> tuple[Held | None, Floats, Floats]:
        """Run the graph `kernels.moments`; return products on the device, sums and sums of squares on the host."""
        found = self.bound(self._kernels.session(moments, rows), feed, ["gram"])
        return found.get("gram"), found["total"][0], found["squares"][0]


class ValueSums:
    """Second moments like `Sums`, on a device: a float32 matrix of a few batches, added to a float64 matrix.

    Float64 activations, values outside the range of float32 sums, and batches for which the device has no room are
    summed on the host.
    """

    def __init__(self, probe: Probe, lane: ValueLane) -> None:
        self._probe, self._lane = probe, lane
        self._single: Any = None
        self._double: Any = None
        self._rest: Any = Squares(probe) if probe.alone else Sums(probe)
        self._total, self._squares = np.zeros((2, probe.width))
        self.count = 0

    def add(self, x: Any, placed: Probe, rows: Bools | None = None) -> None:
        """Add the rows of one batch, see `Sums.add`.

        Raises:
            DataError: `rows` and the activation differ in length, or a value is not finite.
        """
        layout, feed, count = _layout(x, placed, rows)
        if not count:
            return
        if x.dtype in (np.float32, np.float16):
            before = _zero(np.float32) if self._single is None else self._single
            feed |= {"x": x, "before": before, "ones": np.ones((count, 1), np.float32)}
            found = room_for(lambda: self._lane.moments(layout, feed), lambda: None)
            if found is not None and SMALLEST**2 < found[2].max() < LARGEST**2:  # False if a value is NaN
                self._single = found[0]
                self._total += found[1]
                self._squares += found[2]
                self.count += count
                return
        self._rest.add(self._lane.host(x), placed, rows)

    def take(self, part: ValueSums) -> None:
        """Add the sums of `part` in float64 and reset `part`."""
        if part._single is not None:
            before = _zero(np.float64) if self._double is None else self._double
            both = {"part": part._single, "before": before}
            self._double = room_for(
                lambda: self._lane.call(widening, [], both),
                lambda: self._lane.host(before) + self._lane.host(both["part"]),
            )
        self._rest.take(part._rest)
        self._total += part._total
        self._squares += part._squares
        self.count += part.count
        part._single, part.count = None, 0
        part._total[:] = part._squares[:] = 0

    def drain(self) -> tuple[Floats, Floats, int]:
        """Return the sums on the host and reset: the triangle, sums (h,) and the number of rows.

        If the probe's channels stand alone, the triangle is a diagonal (h,).
        """
        half, total, count = self._rest.drain()
        if self._probe.alone:
            half = half + self._squares
        elif self._double is not None:
            gram = packed(self._lane.host(self._double))
            half = gram if not count else gram + half
        found = half, self._total + total, self.count + count
        self._double, self.count = None, 0
        self._total, self._squares = np.zeros((2, self._probe.width))
        return found


def _layout(x: Any, probe: Probe, rows: Bools | None) -> tuple[Rows, dict[str, Any], int]:
    """Return the conversion of an activation to rows, the sizes it needs, and the number of rows.

    Raises:
        DataError: `rows` and the activation differ in length.
    """
    index = probe.index.ravel()
    channels, members = x.shape[probe.axis], index.size // probe.width
    lead, trail = (int(np.prod(part, dtype=np.int64)) for part in (x.shape[: probe.axis], x.shape[probe.axis + 1 :]))
    if rows is not None and rows.size != lead * trail:
        raise wrong_mask(rows.size, lead * trail, probe)
    layout = Rows(
        kind=WORDS.get(x.dtype, ""),
        picked=not np.array_equal(index, np.arange(channels)),
        turned=members * trail > 1,
        chosen=rows is not None,
        alone=probe.alone,
    )
    feed = {
        "front": (lead, channels, trail),
        "index": index,
        "split": (lead, probe.width, members, trail),
        "places": (lead * trail, index.size),
        "rows": np.flatnonzero(rows) if rows is not None else (),
        "flat": (-1, probe.width),
    }
    count = members * (lead * trail if rows is None else int(np.count_nonzero(rows)))
    return layout, {name: np.asarray(numbers, np.int64) for name, numbers in feed.items()}, count


def ends(session: Session, feed: Feed) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the session's inputs that the feed has, and the types of the outputs that are not inputs too."""
    there = {name: feed[name] for name in session.inputs if name in feed}
    return there, {name: session.types[name] for name in session.output_names if name not in session.inputs}


def handed_on(session: Session, feed: Feed) -> dict[str, Any]:
    """Return outputs that are inputs too: ONNX Runtime would return them unchanged, in memory it does not own."""
    return {name: feed[name] for name in session.output_names if name in session.inputs}


def fits(there: Feed, made: Mapping[str, str], held: Callable[[Any], bool]) -> bool:
    """Return True if a lane can bind all tensors.

    Args:
        there: inputs; only numeric arrays can be bound, not strings or sequences.
        made: types of the outputs.
        held: returns True for an array of the lane's own type.
    """
    numbers = all(held(array) or _is_numbers(wide(array)) for array in there.values())
    return numbers and all(kind in FLOATS or kind in OTHERS for kind in made.values())


def _is_numbers(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "biuf"


def _held(value: Any) -> Any:
    """Return an output of ONNX Runtime as `Held`, or as an empty host array if it has no values."""
    shape, dtype = tuple(value.shape()), np.dtype(FLOATS[value.data_type()])
    return Held(value, shape, dtype) if np.prod(shape, dtype=np.int64) else np.empty(shape, dtype)


def _copied(value: Any) -> Array:
    """Return a copy of the value: on a CPU ONNX Runtime lends its own memory."""
    array = value.numpy()
    return np.array(array) if value.device_name() == "cpu" else np.asarray(array)


def _zero(kind: Any) -> Array:
    """Return a (1, 1) zero, the neutral start of a sum of matrices of any size."""
    return np.zeros((1, 1), kind)
