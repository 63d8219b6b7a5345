"""Arrays in unnamed temporary files: several in each, so that there may be many of them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgrail.graph.io import shelves
from onnxgrail.graph.io.shelves import shelved

COUNT, ROWS = 100, 2**10


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "SHELF", 2**12)
    monkeypatch.setattr(shelves, "_shelves", shelves._Shelves())


def array(number: int, rows: int = ROWS) -> np.ndarray[Any, Any]:
    return np.full((rows, 3), number, np.float32)


def files() -> int:
    """Return the number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def mapped(found: Any) -> bool:
    while found is not None and not isinstance(found, np.memmap):
        found = getattr(found, "base", None)
    return found is not None


linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")


@linux
def test_many_arrays_take_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "SHELVED", 10)
    before = files()
    held = [shelved(array(number)) for number in range(COUNT)]
    assert all(map(mapped, held))
    assert files() - before < COUNT / 8
    for number, found in enumerate(held):
        np.testing.assert_array_equal(found, array(number))
    del held, found
    gc.collect()
    assert files() <= before


def test_arrays_of_other_sizes_share_files() -> None:
    sizes = [ROWS, 2 * ROWS + 1, ROWS + 7, 20 * ROWS, ROWS]
    held = [shelved(array(number, rows)) for number, rows in enumerate(sizes)]
    for number, (found, rows) in enumerate(zip(held, sizes, strict=True)):
        np.testing.assert_array_equal(found, array(number, rows))
        assert mapped(found)


def test_too_many_files_leave_arrays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "SHELVED", 1)
    held = [shelved(array(number)) for number in range(shelves.PLACES + 1)]
    assert [mapped(found) for found in held] == [True] * shelves.PLACES + [False]
    np.testing.assert_array_equal(held[-1], array(shelves.PLACES))


def test_without_room_for_several_arrays_a_file_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    memmap = np.memmap

    def limited(file: Any, **fields: Any) -> Any:
        if os.fstat(file.fileno()).st_size > 2 * ROWS * 12:
            raise OSError
        return memmap(file, **fields)

    monkeypatch.setattr(np, "memmap", limited)
    found = shelved(array(1)), shelved(array(2))
    monkeypatch.undo()
    assert [mapped(one) for one in found] == [True, True]
    np.testing.assert_array_equal(found[1], array(2))


def test_without_room_arrays_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr(shelves, "_write", full)
    assert not mapped(shelved(array(1)))
    monkeypatch.undo()
    monkeypatch.setattr(shelves, "SHELF", 2**12)
    assert mapped(shelved(array(2)))
    assert not mapped(shelved(array(1, 1)))
