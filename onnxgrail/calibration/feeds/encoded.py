"""Feeds for a decoder that is a model of its own: what the encoder makes of tokens, and what the decoder writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.signature import Signature, describe, signature_of
from onnxgrail.calibration.runtime.session import Session, Setup, open_session
from onnxgrail.core import Array, Feed
from onnxgrail.errors import DataError, ModelError
from onnxgrail.graph.io.model_file import load

STATES = "encoder_hidden_states"
SAME = {
    "encoder_attention_mask": "attention_mask",
    "decoder_input_ids": "input_ids",
    "decoder_attention_mask": "attention_mask",
}
"""The inputs of a decoder that repeat one of the encoder, by the names of Hugging Face's exporters."""
OWN, MASKS, SCORES = ("decoder_input_ids", "input_ids"), ("decoder_attention_mask", "attention_mask"), "logits"
LONGEST = 64  # most tokens that a decoder writes


def encoded(encoder: Path, decoder: Path, batches: Iterable[Feed], start: int | None = None) -> list[Feed]:
    """Return feeds for a decoder: it reads the likeliest tokens, one after the other, as if it wrote a text.

    Args:
        encoder: the graph that reads the data.
        decoder: the other one.
        batches: feeds of the encoder.
        start: the token with which a text begins; None if it is not known: the decoder then reads the encoder's tokens.

    Returns:
        A feed per batch, with the encoder's first output as the decoder's `encoder_hidden_states`.

    Raises:
        DataError: an input of the decoder remains without values.
    """
    wanted = signature_of(load(decoder))
    with open_session(encoder, Setup(once=True)) as session:
        states = session.output_names[0]
        feeds = [_feed(feed, session.run(feed)[states], wanted, decoder.name) for feed in batches]
    if start is None:
        return feeds
    with contextlib.suppress(ModelError), open_session(decoder) as session:  # an error: the number of tokens is fixed
        return [_written(session, feed, start) for feed in feeds]
    return feeds


def _written(session: Session, feed: Feed, start: int) -> Feed:
    """Return a feed with the tokens that the decoder writes, as many as the encoder has read."""
    name = next((name for name in OWN if name in feed), None)
    if name is None or SCORES not in session.output_names:
        return feed
    ids = np.full((len(feed[name]), 1), start, feed[name].dtype)
    while ids.shape[1] < min(feed[name].shape[1], LONGEST):
        scores = session.run(_reading(feed, name, ids))[SCORES]
        ids = np.concatenate([ids, scores[:, -1:].argmax(axis=-1).astype(ids.dtype)], axis=1)
    return _reading(feed, name, ids)


def _reading(feed: Feed, name: str, ids: Array) -> Feed:
    """Return a feed with other tokens, all of which are real."""
    return {**feed, **{mask: np.ones_like(ids, feed[mask].dtype) for mask in MASKS if mask in feed}, name: ids}


def _feed(given: Feed, states: Any, wanted: Signature, name: str) -> Feed:
    known = {**given, **{one: given[other] for one, other in SAME.items() if other in given}, STATES: states}
    missing = [entry.name for entry in wanted if entry.name not in known]
    if missing:
        raise DataError(
            f"{name}: neither the data nor the encoder has input {missing[0]!r}",
            hint=f"The model takes: {describe(wanted)}",
        )
    return {entry.name: known[entry.name] for entry in wanted}
