"""Checksums of files, and of one while it is written."""

import hashlib
import os

import numpy as np
import pytest

from onnxgrail.machine.files.placing import Hashed, sha256


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2500))
    return path


def test_it_is_that_of_all_bytes(file):
    assert sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()


def test_that_of_a_file_while_it_is_written(file):
    with file.open("wb") as raw:
        written = Hashed(raw)
        written.write(b"a head")
        written.write(np.arange(250, dtype=np.uint8).data)
    assert (written.size, written.digest) == (file.stat().st_size, sha256(file))
