"""Measures of labels, embeddings and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity.changes import CHANGED
from onnxgrail.fidelity.kinds.part import ACTIVE
from onnxgrail.fidelity.measures.measure import Batch, Measure, nothing_more, share
from onnxgrail.fidelity.sums import cosines, flat

QUIET = 0.1  # lower bound of a sample's energy, as a share of the mean energy
CORRELATED = 0.45  # times the NMSE of numbers: 1 % and 5 % are correlations of 0.989 and 0.943 with the original


def _mean(sums: Floats) -> Floats:
    return share(sums[..., 0], sums[..., 1])


def _average(name: str, loss: str, table: Callable[[Batch], Floats], scale: float = 1.0) -> Measure:
    """Return a measure that averages scores up to 1: its table has the sum of the scores and their number."""
    return Measure(
        name=name,
        higher=True,
        loss=loss,
        table=table,
        value=_mean,
        losses=lambda sums: 1 - _mean(sums),
        scale=scale,
        worst=_mean,
        details=nothing_more,
    )


LABELS = replace(
    _average(
        "equal values",
        "share of other values",
        lambda batch: np.stack([batch.distances.agree, batch.distances.rows], axis=1).astype(np.float64),
        scale=0.8,
    ),
    trials=lambda sums: float(sums[1]),
    stepped=True,
)


def _cosines(batch: Batch) -> Floats:
    """Compute the sum of the cosines of vectors, and their number: one per sample, or one per token."""
    width = batch.a.shape[-1] if batch.part.axis is not None else flat(batch.a).shape[1]
    rows = cosines(batch.a.reshape(-1, width), batch.b.reshape(-1, width)).reshape(len(batch.a), -1)
    weights = np.ones_like(rows) if batch.shown is None else batch.shown.astype(np.float64)
    return np.stack([(rows * weights).sum(axis=1), weights.sum(axis=1)], axis=1)


EMBEDDING = _average("cosine", "1 - cosine", _cosines)


def _squares(batch: Batch) -> Floats:
    """Compute squared error and energy, relative to the common pattern of all samples if there is one.

    If little of an image is changed, the energy is that of the changes, or the share `CHANGED` of the image's if the
    model changes more of this one. If there are scores, both are computed at the positions that are read, then at all.
    """
    if batch.read is not None:
        whole = replace(batch, read=None)
        return np.concatenate([_errors(*batch.compared()), _squares(whole)], axis=1)
    if batch.part.center is not None:
        return _errors(*batch.compared())
    distances = batch.distances
    if batch.part.changes:
        error, energy = _errors(*batch.compared()).T
        most = np.inf if batch.part.units is not None else CHANGED * distances.energy
        return np.stack([error, np.minimum(energy, most)], axis=1)
    if batch.part.columns is None:
        return np.stack([distances.error, distances.energy], axis=1)
    return _errors(batch.a, batch.b)


def _errors(a: Floats, b: Floats) -> Floats:
    return np.stack([np.einsum("ij,ij->i", v, v) for v in (flat(a - b), flat(a))], axis=1)


def _nmse(sums: Floats) -> Floats:
    """Compute squared error over energy; 0 if both are zero, infinite if only the energy is zero."""
    with np.errstate(all="ignore"):
        return np.where(sums[..., 0] == 0, 0.0, sums[..., 0] / sums[..., 1])


def _relative(table: Floats, least: float = QUIET) -> Floats:
    """Compute NMSE per sample; the energy of quiet samples is raised to a share `least` of the mean energy."""
    energy = np.maximum(table[:, 1], least * table[:, 1].mean())
    return _nmse(np.stack([table[:, 0], energy], axis=1))


def _of_numbers(table: Floats) -> Floats:
    """Compute squared error over the mean energy: a few samples may hold nearly all of it.

    What a sample loses beyond 1 (after scaling) counts for all, so that the mean is that of all samples together.
    """
    energy = np.full(len(table), table[:, 1].mean())
    far = _nmse(np.stack([table[:, 0], energy], axis=1))
    within = np.minimum(far, 1 / CORRELATED)
    return np.asarray(within + np.where(np.isfinite(far), far - within, 0.0).mean())


VALUES = Measure(
    name="NMSE",
    higher=False,
    loss="NMSE, at most 1",
    table=_squares,
    value=_nmse,
    losses=lambda table: np.minimum(_relative(table, 1.0), 1.0),
    scale=3.0,
    worst=_relative,
    details=nothing_more,
)
CENTERED = replace(
    VALUES,
    name="NMSE about the mean of the samples",
    loss="NMSE about the mean of the samples, at most 1",
    scale=0.7,  # with 0.4, files within 1 % were off by up to 1.4 of 192 pixels
)
NUMBERS = replace(CENTERED, loss="NMSE about the mean of the samples", losses=_of_numbers, scale=CORRELATED)
CHANGES = replace(
    VALUES,
    name="NMSE of what the model changes",
    loss="NMSE of what the model changes, at most 1",
    scale=CHANGED * VALUES.scale,  # at 1 %, the error is 15 dB below what the model changes
)
BOXES = replace(
    VALUES,
    name=f"NMSE where a score is above {ACTIVE}",
    loss=f"NMSE where a score is above {ACTIVE}, at most 1",
    scale=8.0,
)
UNREAD = replace(  # if no position has a score that is read
    VALUES,
    value=lambda sums: _nmse(sums[..., 2:]),
    losses=lambda table: VALUES.losses(table[:, 2:]),
    worst=lambda table: _relative(table[:, 2:]),
)
