"""Checksums that are made while other work goes on."""

import hashlib
import os
import threading

import numpy as np
import pytest

from onnxgrail import checksums as module
from onnxgrail.checksums import Checksums, Hashed, sha256


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 1000)  # several pieces, the last of them short
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2500))
    return path


def test_it_is_that_of_all_pieces(file):
    assert sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("threads", [1, 2])
def test_begun_or_not_it_is_the_same(file, threads):
    begun, unknown = Checksums(threads=threads), Checksums(threads=threads)
    begun.begin(file)
    assert begun.of(file) == unknown.of(file) == sha256(file)


def test_that_of_a_file_while_it_is_written(file):
    with file.open("wb") as raw:
        written = Hashed(raw)
        written.write(b"a head")
        written.write(np.arange(250, dtype=np.uint8).data)
    assert (written.size, written.digest) == (file.stat().st_size, sha256(file))


@pytest.mark.parametrize("threads", [1, 2])
def test_many_files_are_read_one_after_the_other(file, threads):
    """Each reader takes the memory of a piece; exports of large models have a file per weight."""
    others = [file.with_name(str(number)) for number in range(50)]
    for number, path in enumerate(others):
        path.write_bytes(bytes([number]))
    before, checksums = threading.active_count(), Checksums(threads=threads)
    checksums.begin(file, *others)
    assert threading.active_count() <= before + 1
    assert [checksums.of(path) for path in others] == [sha256(path) for path in others]


def test_a_failure_is_raised_where_it_is_asked_for(file, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "_read", broken)
    checksums = Checksums(threads=2)
    checksums.begin(file)
    with pytest.raises(OSError, match="Input/output error"):
        checksums.of(file)
