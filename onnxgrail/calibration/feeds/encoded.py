"""Feeds for a decoder that is a model of its own: tokens, and what the encoder makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onnxgrail.calibration.feeds.signature import Signature, describe, signature_of
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Feed
from onnxgrail.errors import DataError
from onnxgrail.graph.io.model_file import load

STATES = "encoder_hidden_states"
SAME = {
    "encoder_attention_mask": "attention_mask",
    "decoder_input_ids": "input_ids",
    "decoder_attention_mask": "attention_mask",
}
"""The inputs of a decoder that repeat one of the encoder, by the names of Hugging Face's exporters."""


def encoded(encoder: Path, decoder: Path, batches: Iterable[Feed]) -> list[Feed]:
    """Return feeds for a decoder: it reads the tokens that the encoder has read.

    Returns:
        A feed per batch, with the encoder's first output as the decoder's `encoder_hidden_states`.

    Raises:
        DataError: an input of the decoder remains without values.
    """
    wanted = signature_of(load(decoder))
    with open_session(encoder, Setup(once=True)) as session:
        states = session.output_names[0]
        return [_feed(feed, session.run(feed)[states], wanted, decoder.name) for feed in batches]


def _feed(given: Feed, states: Any, wanted: Signature, name: str) -> Feed:
    known = {**given, **{one: given[other] for one, other in SAME.items() if other in given}, STATES: states}
    missing = [entry.name for entry in wanted if entry.name not in known]
    if missing:
        raise DataError(
            f"{name}: neither the data nor the encoder has input {missing[0]!r}",
            hint=f"The model takes: {describe(wanted)}",
        )
    return {entry.name: known[entry.name] for entry in wanted}
