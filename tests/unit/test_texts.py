"""Outputs that predict the tokens of a text are found by what the model does, whatever the names are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.runtime.session import USUAL, open_session
from onnxgrail.calibration.texts import Text, text_of
from onnxgrail.core import Array, Feed
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import tiny

VOCABULARY = 97
NEXT = np.roll(np.eye(VOCABULARY, dtype=np.float32), 1, axis=1)  # token i + 1 follows token i
NOISE = np.random.default_rng(0).standard_normal((VOCABULARY, VOCABULARY)).astype(np.float32)


def model(table: Array, end: str = "", ids: str = "idx", scores: str = "view_30") -> bytes:
    body = f"{scores if not end else 'h'} = Gather(table, {ids})"
    return to_bytes(tiny(f"int64[N,S] {ids} => float[] {scores}", body + ("\n" + end if end else ""), {"table": table}))


def texts(count: int = 8, length: int = 12, *, seed: int = 0) -> Array:
    starts = np.random.default_rng(seed).integers(0, VOCABULARY, (count, 1))
    return (starts + np.arange(length) * np.where(np.arange(length) < 9, 1, 2)) % VOCABULARY


def found(source: bytes, feed: Feed) -> Text | None:
    with open_session(source, USUAL) as session:
        return text_of(session.run, feed, session.run(feed))


def test_any_name_will_do() -> None:
    assert found(model(6 * NEXT), {"idx": texts()}) == Text("idx", "view_30")


@pytest.mark.parametrize(
    "source",
    [
        model(NOISE),  # one vector per token, as wide as the vocabulary
        model(6 * NEXT, "m = Constant<value_ints=[1]>()\nr = ReduceMean(h, m)\nview_30 = Add(h, r)"),
        model(np.zeros((VOCABULARY, VOCABULARY - 40), np.float32)),  # fewer columns than tokens
    ],
    ids=["a vector", "a model that sees later tokens", "classes"],
)
def test_other_rows_are_no_predictions(source: bytes) -> None:
    assert found(source, {"idx": texts()}) is None


@pytest.mark.parametrize(
    "other", [np.tile(np.arange(12), (8, 1)), np.ones((8, 12), np.int64)], ids=["positions", "a mask"]
)
def test_positions_and_masks_are_no_tokens(other: Array) -> None:
    text = "int64[N,S] idx, int64[N,S] other => float[] y"
    source = to_bytes(tiny(text, "h = Gather(table, idx)\nz = Mul(other, other)\ny = Identity(h)", {"table": 6 * NEXT}))
    assert found(source, {"idx": texts(), "other": other}) == Text("idx", "y")
    assert found(source, {"idx": other, "other": texts()}) != Text("idx", "y")


def test_two_inputs_of_whole_numbers_may_both_be_tokens() -> None:
    text = "int64[N,S] idx, int64[N,S] other => float[] y"
    source = to_bytes(tiny(text, "h = Gather(table, idx)\nz = Mul(other, other)\ny = Identity(h)", {"table": 6 * NEXT}))
    assert found(source, {"idx": texts(), "other": texts(seed=1)}) is None


def test_they_are_judged_by_perplexity() -> None:
    """An output without a telling name has the loss and the perplexity of one that is called logits."""
    tallies = []
    for name in ("view_30", "logits"):
        pair = Pair(model(6 * NEXT, scores=name), model(6 * NEXT + NOISE, scores=name))
        tallies.append(
            run_both(pair, Batches(feeds=(lambda: {"idx": texts()},), samples=8, source="texts"), texts=True)
        )
    one, two = (tally.results()[0] for tally in tallies)
    assert one.verdicts[0].kind == "tokens"
    assert one.agreement is not None
    assert replace(one, name="logits") == two
