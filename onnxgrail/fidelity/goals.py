"""Known classes for scores: labels of samples or tokens, or the next token of a text."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from onnxgrail.core import Array, Bools, Ints, Labels

UNKNOWN = -1  # any negative label counts as unknown, such as the -100 of training scripts
IGNORED = 255  # what data sets of images call a position without a class, unless there are so many classes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Goals:
    """The known classes of one feed.

    Attributes:
        labels: that came with the samples.
        tokens: (B, S) ids of texts whose next token the model predicts.
        scores: the output that predicts them; empty if only its name tells.
    """

    labels: Labels | None = None
    tokens: Array | None = None
    scores: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hits:
    """Sums over rows of scores with known class, for the reference (a) and the other model (b).

    Attributes:
        rows: number of rows; texts: True if each row is a token, not a sample.
        right_a, right_b: rows whose largest score is that of the class; loss_a, loss_b: sums of the negative logarithms
            of the class's probability.
    """

    rows: int = 0
    texts: bool = False
    right_a: int = 0
    right_b: int = 0
    loss_a: float = 0.0
    loss_b: float = 0.0

    def merge(self, other: Hits) -> Hits:
        """Return the sums over both sets of rows."""
        names = [field.name for field in fields(self) if field.name != "texts"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Hits(texts=self.texts or other.texts, **sums)


def classes_of(goals: Goals, shape: tuple[int, ...], mask: Bools | None) -> Ints | None:
    """Return the class of every row of scores, negative if unknown; None if no class is known.

    Args:
        goals: the known classes.
        shape: of the scores, classes last.
        mask: (B, S) True at real tokens.
    """
    rows, count = shape[:-1], shape[-1]
    labels, tokens = goals.labels, goals.tokens
    if labels is not None:
        labels = replace(labels, values=_cut(labels.values, rows))
    if labels is not None and labels.values.size == np.prod(rows) and labels.values.shape[:1] == rows[:1]:
        found = labels.values.reshape(rows).astype(np.int64)
        found = np.where(found == IGNORED, UNKNOWN, found) if count <= IGNORED else found
        highest = found.max(initial=0) if labels.highest is None else labels.highest
        if highest >= count or labels.classes not in (None, count):
            return None  # labels belong to another model's classes
        return np.where(mask, found, UNKNOWN) if mask is not None and mask.shape == rows else found
    if tokens is None or len(shape) != 3 or tokens.shape != rows or tokens.max(initial=0) >= count:
        return None
    found = np.full(rows, UNKNOWN, np.int64)
    found[:, :-1] = tokens[:, 1:] if mask is None else np.where(mask[:, 1:] & mask[:, :-1], tokens[:, 1:], UNKNOWN)
    return found


def _cut(labels: Array, rows: tuple[int, ...]) -> Array:
    """Return labels of texts (B, S) without what all texts of a feed lack, as those of other feeds may be longer."""
    longer = labels.ndim == len(rows) == 2 and labels.shape[1] > rows[1]
    return labels[:, : rows[1]] if longer and (labels[:, rows[1] :] < 0).all() else labels


def hits(log_a: Array, log_b: Array, classes: Ints, *, texts: bool) -> Hits:
    """Count correct rows of both models.

    Args:
        log_a: logarithms of the reference's probabilities (rows, classes).
        log_b: the same of the other model.
        classes: (rows,) the class of each row, negative if unknown.
        texts: True if each row is a token, not a sample.
    """
    known = np.flatnonzero(classes >= 0)
    right = classes[known]
    a, b = log_a[known], log_b[known]
    places = np.arange(len(known))
    return Hits(
        rows=len(known),
        texts=texts,
        right_a=int(np.count_nonzero(a.argmax(axis=1) == right)),
        right_b=int(np.count_nonzero(b.argmax(axis=1) == right)),
        loss_a=-float(a[places, right].sum()),
        loss_b=-float(b[places, right].sum()),
    )
