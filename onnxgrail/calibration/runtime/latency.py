"""Time of a run in ONNX Runtime; two models alternate so that a busy machine slows both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from onnxgrail.calibration.feeds.signature import Signature, stays
from onnxgrail.calibration.runtime.measured import duration, once
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.calibration.runtime.timing import Times, summarise, take_turns
from onnxgrail.core import Array, Feed, Floats
from onnxgrail.graph.io.serial import Packed
from onnxgrail.machine.steps.codec import Codec, Record

WARM, LEAST, MOST = 2, 9, 60  # runs of each model
SECONDS = 1.0  # time spent on a pair of models once there are enough runs
LONGER = 1.5  # seconds, if times are reported with their spread

Source = Packed | bytes | str | Path


def single(feed: Feed, signature: Signature) -> dict[str, Array]:
    """Return the first sample of a feed if the model leaves the batch open, else the whole feed; see `stays`."""
    arrays = {entry.name: feed[entry.name] for entry in signature if entry.name in feed}
    fixed = any(entry.shape and isinstance(entry.shape[0], int) for entry in signature)
    if fixed or stays(arrays, signature) or len({a.shape[0] for a in arrays.values() if a.ndim}) != 1:
        return arrays
    return {name: a[:1] if a.ndim else a for name, a in arrays.items()}


def in_turn(
    first: Packed | bytes, second: Packed | bytes, feeds: tuple[Feed, Feed], *, providers: Sequence[str]
) -> tuple[float, float]:
    """Return median milliseconds per run of two models, measured alternately and once per machine.

    Raises:
        ModelError: ONNX Runtime does not load or run one of them.
    """

    def medians() -> tuple[float, float]:
        one, two = np.median(_turns((first, second), feeds, providers, seconds=SECONDS, warm=WARM), axis=1).tolist()
        return one, two

    return once("runs", (first, second), feeds, providers, medians, PAIR)


def _pair(record: Record) -> tuple[float, float]:
    one, two = map(duration, record.notes["ms"])
    if not (one and two):
        raise ValueError("no run takes no time")
    return one, two


PAIR: Codec[tuple[float, float]] = Codec(lambda pair: Record(notes={"ms": list(pair)}), _pair)
"""The storage format of two times, for `once`."""


def times_of(sources: Iterable[Source], feeds: Sequence[Feed], *, providers: Sequence[str]) -> tuple[Times, ...]:
    """Measure the time per run of several models alternately, each on its feed.

    Raises:
        ModelError: ONNX Runtime does not load or run one of them.
    """
    return summarise(_turns(sources, feeds, providers, seconds=LONGER))


def _turns(
    sources: Iterable[Source], feeds: Sequence[Feed], providers: Sequence[str], *, seconds: float, **more: int
) -> Floats:
    """Return milliseconds (models, rounds)."""
    with ExitStack() as stack:
        setup = Setup(providers=providers, timed=True)
        sessions = [stack.enter_context(open_session(source, setup)) for source in sources]
        return take_turns(sessions, feeds, least=LEAST, most=MOST, seconds=seconds, **more)
