"""A cache of activations at a cut of the network: in memory up to a budget, in memory-mapped files beyond it.

If a lane keeps tensors on a device, the device has a budget of its own; tensors that exceed it are cached on the host.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from onnxgrail.calibration.devices.lanes import HOST, Lane
from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.core import Array, Bools, Feed
from onnxgrail.machine.files.temporary import no_room, temporary_folder

BUDGET = 2**30  # bytes
SMALL = 2**16  # arrays below this stay in memory: a mapping costs more than it saves


@dataclass(frozen=True, slots=True)
class _Stored:
    """An array in a file."""

    file: IO[bytes]
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def load(self) -> Array:
        """Return the array as a memory map: the system reads pages on access and may drop them again."""
        return np.memmap(self.file, dtype=self.dtype, mode="r", offset=self.offset, shape=self.shape)


class Cache:
    """Named arrays of each batch. Arrays that exceed the memory budget are written to anonymous temporary files.

    There is one file per array name. Closing it frees its disk space at once, and a killed process leaves no files.
    """

    def __init__(self, feeds: Iterable[Feed], budget: int = BUDGET, lane: Lane = HOST) -> None:
        self._budget, self._held = budget, 0
        self._lane, self._away = lane, 0  # bytes on the device
        self._files: dict[str, IO[bytes]] = {}
        self._batches: list[dict[str, Array | _Stored]] = []
        for number, feed in enumerate(feeds):
            self._batches.append({})
            self.add(number, feed)

    def __contains__(self, name: object) -> bool:
        """Return True if every batch has an array of this name."""
        return bool(self._batches) and name in self._batches[0]

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Iterate over the batches; yield all arrays of each."""
        return map(self.batch, range(len(self)))

    def batch(self, number: int) -> dict[str, Array]:
        """Return all arrays of one batch."""
        return {name: a.load() if isinstance(a, _Stored) else a for name, a in self._batches[number].items()}

    @property
    def names(self) -> list[str]:
        """Return the names of the arrays, the same in every batch."""
        return list(self._batches[0]) if self._batches else []

    @property
    def held(self) -> int:
        """Return the number of bytes in memory."""
        return self._held

    def add(self, number: int, arrays: Feed) -> None:
        """Add arrays to one batch."""
        for name, given in arrays.items():
            array = self._lane.kept(given, self._lane.room - self._away)
            self._away += self._lane.size(array)
            size = _size(array)
            if self._held + size > self._budget and size >= SMALL:
                self._batches[number][name] = self._stored(name, array)
            else:
                self._batches[number][name] = array
                self._held += size

    def keep(self, names: Collection[str]) -> None:
        """Drop all arrays except those with the given names, and close their files."""
        self._batches = [{n: a for n, a in batch.items() if n in names} for batch in self._batches]
        here = [a for batch in self._batches for a in batch.values() if not isinstance(a, _Stored)]
        self._held, self._away = (sum(measure(a) for a in here) for measure in (_size, self._lane.size))
        for name in self._files.keys() - set(names):
            self._files.pop(name).close()

    def trim(self, number: int, names: Collection[str]) -> None:
        """Drop all arrays of one batch except those with the given names; `keep` closes the files later."""
        batch = self._batches[number]
        gone = [a for name, a in batch.items() if name not in names and not isinstance(a, _Stored)]
        self._held -= sum(_size(array) for array in gone)
        self._away -= sum(self._lane.size(array) for array in gone)
        self._batches[number] = {name: array for name, array in batch.items() if name in names}

    def clear(self) -> None:
        """Drop all arrays of all batches."""
        self.keep(())
        self._batches.clear()

    def _stored(self, name: str, array: Array) -> _Stored:
        try:
            if name not in self._files:
                self._files[name] = tempfile.TemporaryFile(dir=temporary_folder())  # noqa: SIM115  closed by `keep`
            file = self._files[name]
            start = file.seek(0, 2)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
        except OSError as error:
            raise no_room(error) from error
        return _Stored(file, start, array.shape, array.dtype)


def _size(array: Array) -> int:
    """Return the bytes that the array would take in a file; 0 for strings and sequences, which are rare and small."""
    return array.nbytes if isinstance(array, np.ndarray) and array.dtype != object else 0


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """A place where walks begin: a cut with the tensors there, or the feeds.

    Attributes:
        position: of the first node after the cut.
        tensors: per batch.
        masks: per batch the mask (sample, token) of real tokens; None if it has no padding.
        samples: per batch.
        scale: how many times more data than in the traced run pass through the network.
    """

    position: int
    tensors: Iterable[Feed]
    masks: Sequence[Bools | None]
    samples: Sequence[int]
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A cache in use: the activations at the cut; others as in `Beginning`."""

    cache: Cache
    masks: Sequence[Bools | None]
    samples: Sequence[int]
    scale: float

    @classmethod
    def of(cls, feeds: Iterable[Feed], scale: float, budget: int, lane: Lane) -> Opened:
        """Return a cache of feeds."""
        masks, samples = list[Bools | None](), list[int]()

        def noted() -> Iterator[Feed]:
            for feed in feeds:
                masks.append(padding_mask(feed))
                samples.append(_samples(feed))
                yield feed

        return cls(Cache(noted(), budget, lane), masks, samples, scale)

    @classmethod
    def at(cls, place: Beginning, budget: int, lane: Lane) -> Opened:
        """Return a cache of what is at a cut."""
        return cls(Cache(place.tensors, budget, lane), place.masks, place.samples, place.scale)


def _samples(feed: Feed) -> int:
    """Return the length of the first axis if all arrays have the same, else 1."""
    sizes = {array.shape[0] if array.ndim else 1 for array in feed.values()}
    return int(sizes.pop()) if len(sizes) == 1 else 1
