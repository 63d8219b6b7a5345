"""Detection of models that predict the next token, by running them."""

from __future__ import annotations

import numpy as np

from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.calibration.runtime.session import Session
from onnxgrail.core import Array, Feed

NAMES = ("decoder_input_ids", "input_ids")  # logits belong to the first name that the feed has


def predicted(session: Session, feed: Feed, outputs: Feed) -> str | None:
    """Return the name of the input whose next tokens the model predicts; None if it does not.

    Models that fill in blanks have outputs of the same shape, but their outputs depend on later tokens.  So the last
    token is changed: if outputs at earlier tokens change, the model does not predict the next token.
    """
    name = next((name for name in NAMES if name in feed), None)
    if name is None:
        return None
    tokens, mask = feed[name], padding_mask(feed)
    scores = next((n for n, a in outputs.items() if "logit" in n.lower() and _per_token(a, tokens)), None)
    if scores is None or tokens.shape[1] < 2 or tokens.min() == tokens.max():
        return None
    real = np.ones(tokens.shape, bool) if mask is None or mask.shape != tokens.shape else mask
    last = tokens.shape[1] - 1 - real[:, ::-1].argmax(axis=1)
    rows = np.arange(len(tokens))
    other = tokens.copy()
    other[rows, last] = np.where(tokens[rows, last] == tokens.max(), tokens.min(), tokens.max())
    before, after = outputs[scores], np.asarray(session.run({**feed, name: other})[scores])
    earlier = real & (np.arange(tokens.shape[1]) < last[:, None])
    size = float(np.abs(before[earlier]).max(initial=0.0))
    return name if np.allclose(before[earlier], after[earlier], rtol=1e-3, atol=1e-3 * size) else None


def _per_token(array: object, tokens: Array) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 3 and array.shape[:2] == tokens.shape
