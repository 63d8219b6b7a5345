"""Readers of NumPy files: `.npz`, `.npy`, and folders of those.  Large arrays are read row by row."""

from __future__ import annotations

import itertools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.kinds.kind import Kind, with_suffix
from onnxgrail.calibration.feeds.matching import from_mapping
from onnxgrail.calibration.feeds.parts import Column, Part, Rows, natural, readable
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature, describe
from onnxgrail.core import Array, Ints
from onnxgrail.errors import DataError
from onnxgrail.machine.files.unchanged import SteadyFile

LARGE = 2**26  # bytes; smaller arrays are read at once, which also verifies the archive's checksum
SUFFIXES = (".npz", ".npy")
LOCAL_HEADER = 30  # bytes of a zip member's header before its name
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Stored(Column):
    """Rows of a large array in a file."""

    def __init__(self, file: SteadyFile, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Describe an array of this shape and dtype that begins at byte `offset` of the file."""
        super().__init__(shape, dtype)
        self._file, self._offset = file, offset

    def rows(self, numbers: Ints) -> Array:
        """Read the samples with these numbers, consecutive rows at once."""
        found = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        size = found.nbytes // max(len(numbers), 1)
        room = found.reshape(-1).view(np.uint8).data
        cuts = [0, *np.flatnonzero(np.diff(numbers) != 1) + 1, len(numbers)]
        for start, stop in itertools.pairwise(map(int, cuts)):
            if stop > start:
                first = self._offset + int(numbers[start]) * size
                self._file.read_into(first, room[start * size : stop * size])
        return found


def from_npz(path: Path, signature: Signature, _: Reading, __: int | None) -> tuple[Part, ...]:
    """Read an array per input from an archive."""
    with readable(path), np.load(path, allow_pickle=False) as file:
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{str(path)!r} is not an .npz archive", hint="Write it with numpy.savez")
        # Names first: an archive that does not fit is rejected before its arrays are read.
        return (from_mapping(_Lazy(file, path), signature, path.name),)


class _Lazy(Mapping[str, Any]):
    """An archive as a mapping that reads arrays on access, and large uncompressed arrays row by row."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path = file, path

    def __getitem__(self, name: str) -> Any:
        member = next((m for m in self._file.zip.infolist() if m.filename == f"{name}.npy"), None)
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            return self._file[name]
        with self._path.open("rb") as file:
            file.seek(member.header_offset)
            lengths: tuple[int, int] = struct.unpack("<HH", file.read(LOCAL_HEADER)[26:30])  # of name and extra field
        stored = _stored(self._path, member.header_offset + LOCAL_HEADER + sum(lengths), member.file_size)
        return self._file[name] if stored is None else stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.files)

    def __len__(self) -> int:
        return len(self._file.files)


def _stored(path: Path, start: int, size: int) -> Stored | None:
    """Return the array in these bytes of a file; None if it is small or unusual and is better read by numpy."""
    if size < LARGE:
        return None
    steady = SteadyFile(path, DataError)
    with path.open("rb") as file:
        file.seek(start)
        read = READERS.get(np.lib.format.read_magic(file))
        if read is None:
            return None
        shape, fortran, dtype = read(file)
        offset = file.tell()
    held = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if fortran or not shape or dtype.hasobject or dtype.names or offset - start + held != size:
        return None  # numpy reports the error
    return Stored(steady, offset, shape, dtype)


def from_npy(path: Path, signature: Signature, _: Reading, __: int | None) -> tuple[Part, ...]:
    """Read the array of a model's only input."""
    if len(signature) != 1:
        raise DataError(
            f"{path.name} holds one array, the model takes {len(signature)} inputs",
            hint=f"Save an .npz with: {describe(signature)}",
        )
    return (Part(source=path.name, arrays={signature[0].name: _array(path)}),)


def _array(path: Path) -> Rows:
    with readable(path):
        stored = _stored(path, 0, path.stat().st_size)
        if stored is not None:
            return stored
        array: Array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise DataError(f"{str(path)!r} is not an .npy array", hint="Write it with numpy.save")
        return array


def has_arrays(folder: Path) -> bool:
    """Return True if a folder contains NumPy files."""
    return folder.is_dir() and any(f.suffix in SUFFIXES for f in folder.iterdir())


def from_folder(folder: Path, signature: Signature, reading: Reading, limit: int | None) -> tuple[Part, ...]:
    """Read every file in the order of their names; `.npy` files named as the inputs form one part.

    Raises:
        DataError: there are files of both kinds, or a file does not fit.
    """
    archives, arrays = sorted(folder.glob("*.npz"), key=natural), sorted(folder.glob("*.npy"), key=natural)
    if archives and arrays:
        raise DataError(f"{str(folder)!r} holds both .npz and .npy files", hint="Keep one kind")
    if archives:
        return tuple(part for f in archives for part in from_npz(f, signature, reading, limit))
    names = {f.stem for f in arrays}
    if len(signature) > 1 or names & {entry.name for entry in signature}:
        return (from_mapping({f.stem: _array(f) for f in arrays}, signature, folder.name),)
    return tuple(part for f in arrays for part in from_npy(f, signature, reading, limit))


NPZ = Kind(with_suffix(".npz"), from_npz)
NPY = Kind(with_suffix(".npy"), from_npy)
FOLDER = Kind(has_arrays, from_folder, holds=lambda file: len(file.parts) == 1 and file.suffix in SUFFIXES)
