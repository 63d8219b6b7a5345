"""Checksums that are made while other work goes on."""

import hashlib
import os

import pytest

from onnxgrail import paths
from onnxgrail.paths import Checksums, sha256


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "PIECE", 1000)  # several pieces, the last of them short
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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_draft_counts_under_its_later_name(file, threads):
    checksums, wanted, later = Checksums(threads=threads), sha256(file), file.with_name("model.onnx")
    later.write_bytes(b"what was there")
    checksums.begin(file, later)
    file.replace(later)
    assert checksums.of(later) == wanted


@pytest.mark.skipif(os.name == "nt", reason="open files stay")
def test_it_is_made_before_anybody_asks(file):
    checksums, wanted = Checksums(threads=2), sha256(file)
    checksums.begin(file)
    file.unlink()  # it stays open
    assert checksums.of(file) == wanted


def test_a_failure_is_raised_where_it_is_asked_for(file, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(paths, "_digest", broken)
    checksums = Checksums(threads=2)
    checksums.begin(file)
    with pytest.raises(OSError, match="Input/output error"):
        checksums.of(file)
