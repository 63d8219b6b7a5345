"""Batches of data of which none are held back."""

from __future__ import annotations

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source, read_apart
from onnxgrail.calibration.feeds.reading import Reading, Sampling
from onnxgrail.calibration.feeds.signature import Signature


def read(source: Source, signature: Signature, *, reading: Reading | None = None, **sampling: int) -> Batches:
    return read_apart(source, signature, 0, Sampling(**{"samples": None, **sampling}), reading=reading)[0]
