"""How long one run takes in ONNX Runtime, two models in turn so that a busy machine slows both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onnxgrail.calibration.session import open_session
from onnxgrail.calibration.signature import Signature
from onnxgrail.calibration.timing import take_turns
from onnxgrail.core import Array, Feed

WARM, LEAST, MOST = 2, 9, 60  # runs of each model
SECONDS = 1.0  # spent on a pair of models once there are enough runs


def single(feed: Feed, signature: Signature) -> dict[str, Array]:
    """One sample of a feed where the model leaves the batch open, else the feed."""
    arrays = {entry.name: feed[entry.name] for entry in signature if entry.name in feed}
    fixed = any(entry.shape and isinstance(entry.shape[0], int) for entry in signature)
    if fixed or len({a.shape[0] if a.ndim else -1 for a in arrays.values()}) != 1:
        return arrays
    return {name: a[:1] if a.ndim else a for name, a in arrays.items()}


def in_turn(
    first: bytes | str | Path,
    second: bytes | str | Path,
    feeds: tuple[Feed, Feed],
    *,
    providers: Sequence[str],
) -> tuple[float, float]:
    """Median milliseconds per run of two models, measured alternately.

    Raises:
        ModelError: ONNX Runtime does not load or run one of them.
    """
    with (
        open_session(first, providers=providers) as a,
        open_session(second, providers=providers) as b,
    ):
        times = take_turns((a, b), feeds, least=LEAST, most=MOST, seconds=SECONDS, warm=WARM)
    one, two = np.median(times, axis=1).tolist()
    return one, two
