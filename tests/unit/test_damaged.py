"""Damaged files of our own kinds are named in one line, whatever numpy raises on them."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.stream import dense
from onnxgrail.errors import DataError
from onnxgrail.machine.steps import codec
from tests.tiny import mlp

HEADERS = {
    "ends within a string": b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, ",
    "nests": b"(" * 5000,
    "is no literal": b"{'descr': open('x'), 'fortran_order': False, 'shape': (3,)}",
    "asks for terabytes": b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}",
    "has another encoding": b"\xff\xfe\x00",
}


def array_file(header):
    """The bytes of an .npy file with this header."""
    text = header + b" " * (-(len(header) + 11) % 64) + b"\n"
    return np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("name", HEADERS)
def test_statistics(name, tmp_path):
    path = tmp_path / "stats.npz"
    path.write_bytes(array_file(HEADERS[name]))
    with pytest.raises(DataError, match="holds no statistics"):
        dense.load(path, (), mlp(), Batches(feeds=(), samples=0, source="none"))


@pytest.mark.parametrize("name", HEADERS)
def test_steps_of_a_resumed_run(name):
    with pytest.raises(DataError, match="not a record"):
        codec.decode(array_file(HEADERS[name]))
