"""Measures of scores: of classes, of many positions, of the tokens of a vocabulary, of sequences of symbols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onnxgrail.core import Bools, Floats
from onnxgrail.fidelity.kinds.part import Part, probabilities
from onnxgrail.fidelity.kinds.read import chances_of, columns_last
from onnxgrail.fidelity.measures.measure import Batch, Measure, nothing_more, share
from onnxgrail.fidelity.sums import flat, widened

HALF = 0.5
TOP = 100  # one score in 100 is at the top
LEAST = 1e-3  # smallest score that can be at the top
SPARSE = 64  # one score in 64 bounds the highest ones
MANY = 8  # samples of which some should be of another class
BOXED = 3  # axes of lists of scores; maps have more
COUNTED = 5  # sums of positives and of top scores

# ------------------------------------------------------------------------------------------------------ class scores


def _classes(batch: Batch) -> Floats:
    """Compute total variation, equality of the highest class, its margins in both models, 1, and the class."""
    p, q = (_chances(batch.part, values) for values in (batch.a, batch.b))
    rows, best = np.arange(len(p)), p.argmax(axis=1)
    margins = []
    for chances in (p, q):
        others = chances.copy()
        others[rows, best] = -np.inf
        margins.append(chances[rows, best] - others.max(axis=1))
    far = 0.5 * np.abs(p - q).sum(axis=1)
    return np.stack([far, best == q.argmax(axis=1), *margins, np.ones(len(p)), best], axis=1)


def _chances(part: Part, values: Floats) -> Floats:
    """Return probabilities (n, classes); a single one gets its complement."""
    chances = probabilities(flat(values), part.form)
    return np.concatenate([chances, 1 - chances], axis=1) if chances.shape[1] == 1 else chances


def _margins(table: Floats) -> Mapping[str, float]:
    before, after, best = table[:, 2], table[:, 3], table[:, 5]
    alike = len(table) >= MANY and bool((best == best[0]).all())
    return {
        **({"one_class": float(best[0])} if alike else {}),
        "margin_reference": float(before.mean()),
        "margin": float(after.mean()),
        "total_variation": float(table[:, 0].mean()),
    }


CLASSES = Measure(
    name="top-1 agreement",
    higher=True,
    loss="total variation",
    table=_classes,
    value=lambda sums: share(sums[..., 1], sums[..., 4]),
    losses=lambda table: table[:, 0],
    scale=0.8,
    worst=lambda table: table[:, 3],
    details=_margins,
    trials=lambda sums: float(sums[4]),
    counted=True,
)


# ------------------------------------------------------------------------------------------- scores of many positions


def _scores(batch: Batch) -> Floats:
    """Compute per sample: sums of differences and of the higher ones of active scores, positives, and top scores.

    Positives are counted in both models, in a, in b; top scores in both, and on average.  These take most of the time,
    and a loss needs them only if no score is active.
    """
    part = batch.part
    rows = part.rows and part.axis is not None
    first, second = (probabilities(columns_last(v, part) if rows else v, part.form) for v in (batch.a, batch.b))
    p, q = first, second
    if rows and part.dominant is not None:
        p, q = (np.delete(v, part.dominant, axis=-1) for v in (first, second))
    if batch.shown is not None:
        seen = widened(batch.shown, p.ndim)
        p, q = np.where(seen, p, 0.0), np.where(seen, q, 0.0)
    p, q = flat(p), flat(q)
    higher = np.maximum(p, q)
    read = higher > part.least
    far, most = (np.einsum("ij,ij->i", v, read) for v in (np.abs(p - q), higher))  # half the time of `where` and a sum
    if batch.brief and most.all():
        return np.stack([far, most, *[np.full(len(far), np.nan)] * COUNTED], axis=1)
    if rows:
        found = _labels(first, second, part.dominant, batch.shown)
    else:
        a, b = p > HALF, q > HALF
        found = _counts(a & b, a, b)
    return np.stack([far, most, *found, *_top(p, q)], axis=1)


def active(part: Part, a: Floats, b: Floats) -> Bools:
    """Return the mask (n, positions) or (n, height, width) of positions with a score that counts in one of the models.

    Args:
        part: scores of many positions.
        a: (n, positions) or (n, positions, columns) values of the reference; columns lie along the axis of the part.
        b: the same of the other model.
    """
    masks = []
    for values in (a, b):
        chances = chances_of(values, part)
        if chances.ndim > BOXED:  # a heat map, channels first
            masks.append((chances > part.least).any(axis=1))
            continue
        masks.append((chances > part.least).reshape(*chances.shape[:2], -1).any(axis=-1))
    return np.asarray(masks[0] | masks[1])


def _counts(*masks: Bools) -> list[Floats]:
    """Return per sample the number of positions in each mask."""
    return [np.asarray(flat(mask).sum(axis=1), np.float64) for mask in masks]


def _labels(p: Floats, q: Floats, dominant: int | None, shown: Bools | None) -> list[Floats]:
    """Count the positions with the same highest class in both models, and in each those of other than the dominant."""
    first, second = p.argmax(axis=-1), q.argmax(axis=-1)
    a, b = (np.ones(v.shape, bool) if dominant is None else v != dominant for v in (first, second))
    if shown is not None and first.shape[:2] == shown.shape:
        seen = widened(shown, a.ndim)
        a, b = a & seen, b & seen
    return _counts(a & b & (first == second), a, b)


def _top(p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Return per sample the number of scores in the highest 1 % of both models, and the mean number per model."""
    count = p.shape[1]
    if count == 0:
        return np.zeros(len(p)), np.zeros(len(p))
    a, b = ((v >= nth_highest(v, max(1, count // TOP))) & (v > LEAST) for v in (p, q))
    return np.asarray((a & b).sum(axis=1), np.float64), np.asarray(0.5 * (a.sum(axis=1) + b.sum(axis=1)))


def nth_highest(scores: Floats, place: int) -> Floats:
    """Return the score at a place from the top in each sample, (n, 1); 1 is the highest.

    Only scores above a bound are sorted, which every 64th score gives.  `np.partition` needs no bound, but takes ten
    times as long on masks, where many scores are equal.
    """
    found = np.empty((len(scores), 1))
    for row, sample in zip(found, scores, strict=True):
        some = np.sort(sample[::SPARSE])
        high = sample[sample >= some[-min(len(some), 3 * place // SPARSE + 8)]]
        row[0] = np.sort(high if len(high) >= place else sample)[-place]
    return found


def _overlaps(table: Floats) -> Mapping[str, float]:
    sums = table.sum(axis=0)
    named = {"f1": _f1(sums), "top_1_percent": _overlap(sums)}
    return {name: float(value) for name, value in named.items() if np.isfinite(value)}


def _unlike(table: Floats) -> Floats:
    """Compute per sample the difference of active scores, as a share of the higher ones.

    A sample with less in it than the average one counts as much less.
    """
    return share(table[:, 0], np.where(table[:, 1] > 0, np.maximum(table[:, 1], table[:, 1].mean()), 0.0))


def _f1(sums: Floats) -> Floats:
    return share(2 * sums[..., 2], sums[..., 3] + sums[..., 4])


def _overlap(sums: Floats) -> Floats:
    return share(sums[..., 5], sums[..., 6])


SCORES = Measure(
    name="F1 of scores above 0.5",
    higher=True,
    loss="difference of scores above {least}, as a share of the higher ones",
    table=_scores,
    value=_f1,
    losses=_unlike,
    worst=_f1,
    details=_overlaps,
    trials=lambda sums: float(sums[3] + sums[4]) / 2,
)
HIGHEST = replace(  # if no score is above 0.5
    SCORES,
    name="overlap of the top 1 % of scores",
    value=_overlap,
    worst=_overlap,
    trials=lambda sums: float(sums[6]),
)
FAINT = replace(  # if no score is above 0.1
    HIGHEST,
    loss="share of other scores in the top 1 %",
    losses=lambda table: 1 - _overlap(table),
)


# ------------------------------------------------------------------------------------------------ scores of tokens


def _tokens(batch: Batch) -> Floats:
    far = batch.distances
    return np.stack([far.kl, far.rows, far.agree], axis=1)


def _divergence(sums: Floats) -> Floats:
    return share(sums[..., 0], sums[..., 1])


def _token_details(table: Floats) -> dict[str, float]:
    sums = table.sum(axis=0)
    return {
        "agreement": float(share(sums[2], sums[1])),
        "perplexity_factor": float(np.exp(np.minimum(_divergence(sums), 700.0))),
    }


TOKENS = Measure(
    name="KL divergence per token",
    higher=False,
    loss="KL divergence in nats",
    table=_tokens,
    value=_divergence,
    losses=_divergence,
    scale=8.0,
    worst=_divergence,
    details=_token_details,
)


# ------------------------------------------------------- sequences of symbols that a model writes one by one


def _sequences(batch: Batch) -> Floats:
    """Compute the total variation of the whole sequence, its equality in both models, and 1.

    One other symbol changes all that follow, so sequences are compared as a whole. By the chain rule, two models write
    different sequences with a probability of at most the sum of the total variations of their steps. A row that one
    model lacks is another symbol.
    """
    p, q = (values.reshape(len(values), -1, values.shape[-1]) for values in (batch.a, batch.b))
    steps = np.maximum(p.sum(axis=2), q.sum(axis=2)) - np.minimum(p, q).sum(axis=2)
    equal = ((p.argmax(axis=2) == q.argmax(axis=2)) & (p.any(axis=2) == q.any(axis=2))).all(axis=1)
    return np.stack([np.minimum(np.maximum(steps, 0.0).sum(axis=1), 1.0), equal, np.ones(len(p))], axis=1)


SEQUENCES = Measure(
    name="equal sequences",
    higher=True,
    loss="total variation, summed over the steps",
    table=_sequences,
    value=lambda sums: share(sums[..., 1], sums[..., 2]),
    losses=lambda table: table[:, 0],
    scale=0.8,
    worst=lambda table: np.full(len(table), np.nan),
    details=nothing_more,
    trials=lambda sums: float(sums[2]),
    counted=True,
)
