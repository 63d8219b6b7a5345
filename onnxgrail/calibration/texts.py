"""Find the output that predicts the tokens of a text, by what the model does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.core import Array, Bools, Feed
from onnxgrail.fidelity.sums import log_softmax

NAMES = ("decoder_input_ids", "input_ids")  # logits belong to the first name that the feed has
GUESS = 0.9  # share of the surprise of equal chances that a prediction stays below
ROWS = 4096  # most tokens for which surprise is measured


@dataclass(frozen=True, slots=True)
class Text:
    """Names of an input of tokens, and of the output whose rows are the scores of the next one."""

    tokens: str
    scores: str


def text_of(run: Callable[[Feed], Feed], feed: Feed, outputs: Feed) -> Text | None:
    """Return the text whose next tokens the model predicts; None if there is none.

    Models that fill in blanks have outputs of the same shape, but their outputs depend on later tokens.  So the last
    token is changed: if outputs at earlier tokens change, the model does not predict the next token.

    Args:
        run: returns the model's outputs for a feed, samples first.
        feed: the inputs.
        outputs: those for this feed.
    """
    name = _tokens(feed)
    if name is None or feed[name].shape[1] < 2 or feed[name].min() == feed[name].max():
        return None
    tokens, mask = feed[name], padding_mask(feed)
    real = np.ones(tokens.shape, bool) if mask is None or mask.shape != tokens.shape else mask
    scores = _scores(outputs, tokens, real)
    if scores is None:
        return None
    last = tokens.shape[1] - 1 - real[:, ::-1].argmax(axis=1)
    rows = np.arange(len(tokens))
    other = tokens.copy()
    other[rows, last] = np.where(tokens[rows, last] == tokens.max(), tokens.min(), tokens.max())
    before, after = outputs[scores], np.asarray(run({**feed, name: other})[scores])
    earlier = real & (np.arange(tokens.shape[1]) < last[:, None])
    size = float(np.abs(before[earlier]).max(initial=0.0))
    alike = np.allclose(before[earlier], after[earlier], rtol=1e-3, atol=1e-3 * size)
    return Text(name, scores) if alike else None


def _tokens(feed: Feed) -> str | None:
    """Return the input that holds tokens: by name, else the only one with rows of whole numbers."""
    known = next((name for name in NAMES if name in feed), None)
    if known is not None:
        return known
    whole = [name for name, array in feed.items() if array.ndim == 2 and array.dtype.kind in "iu" and _varied(array)]
    return whole[0] if len(whole) == 1 else None


def _varied(array: Array) -> bool:
    """Return True for numbers that are neither a mask nor counted up, as positions are."""
    return len(np.unique(array)) > 2 and not bool((np.diff(array, axis=1) == 1).all())


def _scores(outputs: Feed, tokens: Array, real: Bools) -> str | None:
    """Return the output with scores of each token: named as logits, else one that knows more than equal chances do."""
    rows = [name for name, a in outputs.items() if _per_token(a, tokens) and a.dtype.kind == "f"]
    named = next((name for name in rows if "logit" in name.lower()), None)
    return named or next((name for name in rows if _knows(outputs[name], tokens, real)), None)


def _per_token(array: object, tokens: Array) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 3 and array.shape[:2] == tokens.shape


def _knows(array: Array, tokens: Array, real: Bools) -> bool:
    """Return True if the softmax of the rows expects the next tokens more than equal chances would."""
    count = array.shape[-1]
    pairs = real[:, :-1] & real[:, 1:]
    rows, following = array[:, :-1][pairs][:ROWS].astype(np.float64), tokens[:, 1:][pairs][:ROWS]
    if not len(rows) or tokens.min() < 0 or tokens.max() >= count or not np.isfinite(rows).all():
        return False
    surprise = -log_softmax(rows)[np.arange(len(rows)), following].mean()
    return bool(surprise < GUESS * np.log(count))
