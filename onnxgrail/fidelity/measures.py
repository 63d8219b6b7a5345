"""Measures per kind of output: each converts a batch to sums per sample, and sums over samples to values.

A measure converts a batch to a table (n, k): one row of sums per sample. Rows can be added: `value` takes the sums over
any set of samples, which resampling needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxgrail.core import Bools, Floats
from onnxgrail.fidelity.kinds import Part, probabilities
from onnxgrail.fidelity.sums import Distances, cosines, flat

ACTIVE = 0.1  # scores below it in both models are ignored
HALF = 0.5
TOP = 100  # one score in 100 is at the top
LEAST = 1e-3  # smallest score that can be at the top
QUIET = 0.1  # lower bound of a sample's energy, as a share of the mean energy


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """A part of an output in both models on some samples.

    Attributes:
        part: its content.
        a, b: (n, ...) finite values of the reference and of the other model.
        shown: (n, S) mask of positions that are not padding, if the output has a row for each.
        distances: those of the whole output.
    """

    part: Part
    a: Floats
    b: Floats
    shown: Bools | None
    distances: Distances


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measure:
    """The measure of one kind of output.

    Attributes:
        name: of the reported value.
        higher: True if high values are good.
        loss: name of the continuous loss of a sample.
        table: a batch to (n, k) sums per sample.
        value: (..., k) sums to values; NaN if undefined for these samples.
        losses: (n, k) sums per sample to losses; NaN if undefined for the sample.
        worst: (n, k) sums per sample to the value that is reported for the worst sample.
        details: (n, k) to further measures by name.
        trials: sums to the number of things counted as right or wrong, if the value is such a share.
        counted: True if every sample is one such thing, so that resampling adds no information.
    """

    name: str
    higher: bool
    loss: str
    table: Callable[[Batch], Floats]
    value: Callable[[Floats], Floats]
    losses: Callable[[Floats], Floats]
    worst: Callable[[Floats], Floats]
    details: Callable[[Floats], Mapping[str, float]]
    trials: Callable[[Floats], float] | None = None
    counted: bool = False


def _nothing_more(_: Floats) -> Mapping[str, float]:
    return {}


def share(top: Floats, bottom: Floats) -> Floats:
    """Compute a ratio, NaN if the divisor is not positive."""
    with np.errstate(all="ignore"):
        return np.asarray(np.where(bottom > 0, top / bottom, np.nan))


# ------------------------------------------------------------------------------------------------------ class scores


def _classes(batch: Batch) -> Floats:
    """Compute total variation, equality of the highest class, its margins in both models, and 1."""
    p, q = (_chances(batch.part, values) for values in (batch.a, batch.b))
    rows, best = np.arange(len(p)), p.argmax(axis=1)
    margins = []
    for chances in (p, q):
        others = chances.copy()
        others[rows, best] = -np.inf
        margins.append(chances[rows, best] - others.max(axis=1))
    far = 0.5 * np.abs(p - q).sum(axis=1)
    return np.stack([far, best == q.argmax(axis=1), *margins, np.ones(len(p))], axis=1)


def _chances(part: Part, values: Floats) -> Floats:
    """Return probabilities (n, classes); a single one gets its complement."""
    chances = probabilities(flat(values), part.form)
    return np.concatenate([chances, 1 - chances], axis=1) if chances.shape[1] == 1 else chances


def _margins(table: Floats) -> Mapping[str, float]:
    before, after = table[:, 2], table[:, 3]
    return {
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
    worst=lambda table: table[:, 3],
    details=_margins,
    trials=lambda sums: float(sums[4]),
    counted=True,
)


# ------------------------------------------------------------------------------------------- scores of many positions


def _scores(batch: Batch) -> Floats:
    """Compute per sample: sum of differences of active scores, their number, positives, and top scores.

    Positives are counted in both models, in a, in b; top scores in both, and on average.
    """
    part = batch.part
    rows = part.rows and part.axis is not None
    p, q = (np.moveaxis(v, part.axis or 0, -1) if rows else v for v in (batch.a, batch.b))
    p, q = probabilities(p, part.form), probabilities(q, part.form)
    if rows:
        found = _labels(p, q, part.dominant, batch.shown)
        if part.dominant is not None:
            p, q = (np.delete(v, part.dominant, axis=-1) for v in (p, q))
    if batch.shown is not None:
        seen = batch.shown.reshape(*batch.shown.shape, *([1] * (p.ndim - 2)))
        p, q = np.where(seen, p, 0.0), np.where(seen, q, 0.0)
    p, q = flat(p), flat(q)
    if not rows:
        found = _found(p > HALF, q > HALF)
    active = (p > ACTIVE) | (q > ACTIVE)
    far = np.where(active, np.abs(p - q), 0.0).sum(axis=1)
    return np.stack([far, active.sum(axis=1), *found, *_top(p, q)], axis=1)


def _found(a: Bools, b: Bools) -> tuple[Floats, Floats, Floats]:
    """Return per sample the number of positions that are positive in both models, in the first, in the second."""
    return tuple(np.asarray(flat(v).sum(axis=1), np.float64) for v in (a & b, a, b))  # type: ignore[return-value]


def _labels(p: Floats, q: Floats, dominant: int | None, shown: Bools | None) -> tuple[Floats, Floats, Floats]:
    """Return the same counts for the highest class per position, where it is not the dominant one."""
    first, second = p.argmax(axis=-1), q.argmax(axis=-1)
    a, b = (np.ones(v.shape, bool) if dominant is None else v != dominant for v in (first, second))
    if shown is not None and first.shape[:2] == shown.shape:
        seen = shown.reshape(*shown.shape, *([1] * (a.ndim - 2)))
        a, b = a & seen, b & seen
    both = a & b & (first == second)
    return tuple(np.asarray(flat(v).sum(axis=1), np.float64) for v in (both, a, b))  # type: ignore[return-value]


def _top(p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Return per sample the number of scores in the highest 1 % of both models, and the mean number per model."""
    count = p.shape[1]
    if count == 0:
        return np.zeros(len(p)), np.zeros(len(p))
    place = count - max(1, count // TOP)
    a, b = ((v >= np.partition(v, place, axis=1)[:, place, None]) & (v > LEAST) for v in (p, q))
    return np.asarray((a & b).sum(axis=1), np.float64), np.asarray(0.5 * (a.sum(axis=1) + b.sum(axis=1)))


def _overlaps(table: Floats) -> Mapping[str, float]:
    sums = table.sum(axis=0)
    named = {"f1": share(2 * sums[2], sums[3] + sums[4]), "top_1_percent": share(sums[5], sums[6])}
    return {name: float(value) for name, value in named.items() if np.isfinite(value)}


def _f1(sums: Floats) -> Floats:
    return share(2 * sums[..., 2], sums[..., 3] + sums[..., 4])


SCORES = Measure(
    name="F1 of scores above 0.5",
    higher=True,
    loss="mean difference of scores above 0.1",
    table=_scores,
    value=_f1,
    losses=lambda table: share(table[:, 0], table[:, 1]),
    worst=_f1,
    details=_overlaps,
    trials=lambda sums: float(sums[3] + sums[4]) / 2,
)
HIGHEST = Measure(  # if no score is above 0.5
    name="overlap of the top 1 % of scores",
    higher=True,
    loss=SCORES.loss,
    table=_scores,
    value=lambda sums: share(sums[..., 5], sums[..., 6]),
    losses=SCORES.losses,
    worst=lambda table: share(table[:, 5], table[:, 6]),
    details=_overlaps,
    trials=lambda sums: float(sums[6]),
)


# ----------------------------------------------------------------------------------------------------- the other kinds


def _tokens(batch: Batch) -> Floats:
    far = batch.distances
    return np.stack([far.kl, far.rows, far.agree], axis=1)


def _divergence(sums: Floats) -> Floats:
    return share(sums[..., 0], sums[..., 1])


TOKENS = Measure(
    name="KL divergence per token",
    higher=False,
    loss="KL divergence in nats",
    table=_tokens,
    value=_divergence,
    losses=_divergence,
    worst=_divergence,
    details=lambda table: {
        "agreement": float(share(table[:, 2].sum(), table[:, 1].sum())),
        "perplexity_factor": float(np.exp(np.minimum(_divergence(table.sum(axis=0)), 700.0))),
    },
)


def _labels_equal(batch: Batch) -> Floats:
    far = batch.distances
    return np.stack([far.agree, far.rows], axis=1).astype(np.float64)


def _mean(sums: Floats) -> Floats:
    return share(sums[..., 0], sums[..., 1])


def _average(name: str, loss: str, table: Callable[[Batch], Floats]) -> Measure:
    """Return a measure that averages scores up to 1: its table has the sum of the scores and their number."""
    return Measure(
        name=name,
        higher=True,
        loss=loss,
        table=table,
        value=_mean,
        losses=lambda sums: 1 - _mean(sums),
        worst=_mean,
        details=_nothing_more,
    )


LABELS = _average("equal values", "share of other values", _labels_equal)


def _cosines(batch: Batch) -> Floats:
    """Compute the sum of the cosines of vectors, and their number: one per sample, or one per token."""
    width = batch.a.shape[-1] if batch.part.axis is not None else flat(batch.a).shape[1]
    rows = cosines(batch.a.reshape(-1, width), batch.b.reshape(-1, width)).reshape(len(batch.a), -1)
    weights = np.ones_like(rows) if batch.shown is None else batch.shown.astype(np.float64)
    return np.stack([(rows * weights).sum(axis=1), weights.sum(axis=1)], axis=1)


EMBEDDING = _average("cosine", "1 - cosine", _cosines)


def _squares(batch: Batch) -> Floats:
    """Compute squared error and energy, relative to the common pattern of all samples if there is one."""
    if batch.part.columns is None and batch.part.center is None:
        return np.stack([batch.distances.error, batch.distances.energy], axis=1)
    a = batch.a if batch.part.center is None else batch.a - batch.part.center
    return np.stack([np.einsum("ij,ij->i", v, v) for v in (flat(batch.a - batch.b), flat(a))], axis=1)


def _nmse(sums: Floats) -> Floats:
    """Compute squared error over energy; 0 if both are zero, infinite if only the energy is zero."""
    with np.errstate(all="ignore"):
        return np.where(sums[..., 0] == 0, 0.0, sums[..., 0] / sums[..., 1])


def _relative(table: Floats) -> Floats:
    """Compute NMSE per sample; the energy of quiet samples is raised to a lower bound."""
    energy = np.maximum(table[:, 1], QUIET * table[:, 1].mean())
    return _nmse(np.stack([table[:, 0], energy], axis=1))


VALUES = Measure(
    name="NMSE",
    higher=False,
    loss="NMSE, at most 1",
    table=_squares,
    value=_nmse,
    losses=lambda table: np.minimum(_relative(table), 1.0),
    worst=_relative,
    details=_nothing_more,
)
CENTERED = replace(
    VALUES, name="NMSE about the mean of the samples", loss="NMSE about the mean of the samples, at most 1"
)
MEASURES = {
    "classes": CLASSES,
    "scores": SCORES,
    "tokens": TOKENS,
    "labels": LABELS,
    "embedding": EMBEDDING,
    "values": VALUES,
    "state": VALUES,
}
