"""Key-value caches of an encoder are never filled with length 0: a decoder would see nothing of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.calibration.feeds.matching import from_mapping
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.errors import DataError
from tests.tiny import tiny


def part_of(owner: str) -> Any:
    """The data of a decoder whose caches are missing; its input is renamed since names in ONNX text have no dots."""
    model = tiny(
        "int64[N,S] input_ids, float[N,2,P,4] past => float[] y",
        "e = Cast<to=1>(input_ids)\np = ReduceSum<keepdims=0>(past)\ny = Add(e, p)",
        {},
    )
    model.graph.inputs[1].name = f"past_key_values.0.{owner}.key"
    tokens = np.ones((4, 5), np.int64)
    return from_mapping({"input_ids": tokens}, signature_of(model), "calib.npz")


def test_caches_of_an_encoder_are_not_filled() -> None:
    with pytest.raises(DataError, match="no array for input"):
        part_of("encoder")


def test_those_of_a_decoder_are() -> None:
    assert any("caches of length 0" in note for note in part_of("decoder").notes)
