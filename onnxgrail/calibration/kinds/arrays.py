"""NumPy files: `.npz`, `.npy`, and folders of those.  Large arrays are mapped, not read."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.naming import from_mapping
from onnxgrail.calibration.parts import Part, natural, readable
from onnxgrail.calibration.reading import Reading
from onnxgrail.calibration.signature import Signature, describe
from onnxgrail.core import Array
from onnxgrail.errors import DataError

MAPPED_FROM = 2**26  # bytes; smaller members are read, which also checks their checksum
LOCAL_HEADER = 30  # bytes of a zip member's header before its name


def from_npz(path: Path, signature: Signature, _: Reading, __: int | None) -> tuple[Part, ...]:
    """One array per input."""
    with readable(path), np.load(path, allow_pickle=False) as file:
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{str(path)!r} is not an .npz archive", hint="Write it with numpy.savez")
        # Names first: an archive that does not fit is refused before gigabytes are read.
        return (from_mapping(_Lazy(file, path), signature, path.name),)


class _Lazy(Mapping[str, Any]):
    """An archive as a mapping that reads an array only when asked for it, and maps it where it can."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path = file, path

    def __getitem__(self, name: str) -> Any:
        mapped = _mapped(self._path, self._file.zip, name)
        return self._file[name] if mapped is None else mapped

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.files)

    def __len__(self) -> int:
        return len(self._file.files)


def _mapped(path: Path, archive: zipfile.ZipFile, name: str) -> Array | None:
    """A large member as a window on the file; None where it is small, compressed, or of an unusual kind."""
    member = next((m for m in archive.infolist() if m.filename == f"{name}.npy"), None)
    if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size < MAPPED_FROM:
        return None
    with path.open("rb") as file:
        file.seek(member.header_offset)
        lengths: tuple[int, int] = struct.unpack("<HH", file.read(LOCAL_HEADER)[26:30])  # of name and extra field
        start = member.header_offset + LOCAL_HEADER + sum(lengths)
        file.seek(start)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        version = np.lib.format.read_magic(file)
        if version not in readers:
            return None
        shape, fortran, dtype = readers[version](file)
        offset = file.tell()
    if dtype.hasobject or offset - start + dtype.itemsize * int(np.prod(shape, dtype=np.int64)) != member.file_size:
        return None  # the usual reader says what is wrong
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order="F" if fortran else "C")


def from_npy(path: Path, signature: Signature, _: Reading, __: int | None) -> tuple[Part, ...]:
    """The array of the only input."""
    if len(signature) != 1:
        raise DataError(
            f"{path.name} holds one array, the model takes {len(signature)} inputs",
            hint=f"Save an .npz with: {describe(signature)}",
        )
    return (Part(source=path.name, arrays={signature[0].name: _array(path)}),)


def _array(path: Path) -> Array:
    with readable(path):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise DataError(f"{str(path)!r} is not an .npy array", hint="Write it with numpy.save")
        return array


def has_arrays(folder: Path) -> bool:
    """Whether a folder holds NumPy files."""
    return folder.is_dir() and any(f.suffix in (".npz", ".npy") for f in folder.iterdir())


def from_folder(folder: Path, signature: Signature, reading: Reading, limit: int | None) -> tuple[Part, ...]:
    """Every file in the order of their names; `.npy` files called like the inputs belong together.

    Raises:
        DataError: files of both kinds, or one that does not fit.
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
