"""A file that changes while it is used is an error, however it changes."""

import os

import pytest

from onnxgrail.errors import DataError, ModelError
from onnxgrail.machine.files.unchanged import SteadyFile


@pytest.fixture
def path(tmp_path):
    place = tmp_path / "weights"
    place.write_bytes(bytes(range(200)))
    os.utime(place, ns=(10**18, 10**18))
    return place


def shrink(path):
    os.truncate(path, 100)


def grow(path):
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path):
    path.write_bytes(bytes(200))


def replace(path):
    path.with_name("other").write_bytes(bytes(range(200)))
    os.utime(path.with_name("other"), ns=(10**18, 10**18))
    path.with_name("other").replace(path)


def remove(path):
    path.unlink()


CHANGES = [shrink, grow, rewrite, replace, remove]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_an_error(change, path):
    file, room = SteadyFile(path, ModelError), bytearray(50)
    file.check()
    file.read_into(20, memoryview(room))
    assert bytes(room) == bytes(range(20, 70))
    assert [bytes(piece) for piece in file.pieces(0, 3)] == [b"\0\1\2"]
    change(path)
    for look in (file.check, lambda: file.read_into(20, memoryview(room)), lambda: list(file.pieces(0, 3))):
        with pytest.raises(ModelError, match="changed while it was used"):
            look()


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_held_is_read_when_its_name_leads_elsewhere(change, path):
    file, room = SteadyFile(path, DataError, held=True), bytearray(200)
    change(path)
    with pytest.raises(DataError, match="changed while it was used"):
        file.check()
    if change in (replace, remove):
        file.read_into(0, memoryview(room))
        assert bytes(room) == bytes(range(200))
    else:
        with pytest.raises(DataError, match="changed while it was used"):
            file.read_into(0, memoryview(room))


def test_a_file_that_ends_while_it_is_read(path, monkeypatch):
    file = SteadyFile(path, ModelError)
    monkeypatch.setattr(file, "_compare", lambda _: None)  # as if it was cut after that
    os.truncate(path, 100)
    with pytest.raises(ModelError, match="ends at byte 100"):
        file.read_into(50, memoryview(bytearray(100)))
