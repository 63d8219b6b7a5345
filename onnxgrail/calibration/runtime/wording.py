"""Texts for messages: shapes of feeds, and the reason that an ONNX Runtime exception gives."""

from __future__ import annotations

import re

import numpy as np

from onnxgrail.core import Feed

NAMED = 4  # maximum number of inputs whose shapes a message lists


def shapes_of(feed: Feed) -> str:
    """Return the names and shapes of a feed's first inputs, as text."""
    shapes = [f"{name}{list(np.shape(array))}" for name, array in feed.items()]
    more = f" and {len(shapes) - NAMED} more" if len(shapes) > NAMED + 1 else ""
    return ", ".join(shapes[:NAMED] if more else shapes) + more


def reason(error: BaseException) -> str:
    """Return the message of an ONNX Runtime exception without its error-code prefix, source lines and stack."""
    return reason_of(str(error))


def reason_of(message: str) -> str:
    """Return a message of ONNX Runtime without its error-code prefix, source lines and stack."""
    text = " ".join(message.split())
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"/\S+?/onnxruntime/\S+:\d+ .*?\) ", "", text)
    return re.sub(r" ; GPU=-?\d+ ; hostname=.*", "", text)[:400]
