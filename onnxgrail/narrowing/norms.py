"""Implements `--norms`: scales and biases are corrected so that activations match the dense network's.

All widths and weights are decided before. Two streams walk the dense and the narrowed network side by side. The
constants that scale and shift the channels of an activation are corrected in network order, each after all upstream
ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.fit.channelwise import (
    Affine,
    distance,
    moved,
    narrowed,
    pool_of,
    pooled,
    refit,
    repair,
    sums,
    twins,
    zero_sums,
)
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.core import Array, Bools, Change, Floats, Ints, Outcome
from onnxgrail.graph.fittable.scales import Part, Place, places
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import RECORD, Record
from onnxgrail.narrowing.layers import of_addition, with_addition

FOLDS = 4  # one sample in four is held out
SAME = 1e-9  # relative squared error below which an activation counts as unchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """The report entry of one activation.

    Attributes:
        node: the convolution or normalization; kind: `repair` or `refit`.
        before, after: squared error on held-out rows as a share of the dense network's energy, at the tensor through
            which all effects of the place pass (`Place.judged`).
        outcome: `plain` if the constants stay because the error would not decrease.
    """

    node: str
    kind: str
    before: float
    after: float
    outcome: Outcome


def bring_back(
    prepared: Prepared, job: Job, ledger: Ledger, changes: Sequence[Change]
) -> tuple[Ledger, tuple[Norm, ...], float]:
    """Correct scales and biases place by place; of several processes the first one measures and decides.

    Args:
        prepared: the model and its data.
        job: its recipe selects the places (`norms`); its steps cache results.
        ledger: the narrowed network.
        changes: all decisions about blocks.

    Returns:
        The ledger with new constants, one entry per place that changed, and seconds inside ONNX Runtime.
    """
    first = min(c.block.span[0] for c in changes)
    model, survey = prepared.model, prepared.survey
    todo = [p for p in places(model, survey) if p.position >= first and job.recipe.norms in (p.kind, "all")]
    report: list[Norm] = []
    untouched, stand = weights.empty(survey), twins(survey.ids, changes)
    with stream_of(prepared, job.recipe, share=2) as dense, stream_of(prepared, job.recipe, share=2) as narrow:
        for number, place in enumerate(todo):
            dense.advance(untouched, place.position)
            narrow.advance(ledger, place.position)
            pair = _Pair(prepared, place, dense, narrow, untouched, stand)
            key = f"norm {place.position} {place.node}"
            found = job.steps.once(key, functools.partial(_recorded, pair, ledger), RECORD)
            ledger = with_addition(ledger, found, model)
            report += [Norm(**{**row, "outcome": Outcome(**row["outcome"])}) for row in found.notes["norms"]]
            job.progress("norms", number + 1, len(todo))
        return ledger, tuple(report), dense.forward + narrow.forward


def _recorded(pair: _Pair, ledger: Ledger) -> Record:
    """Correct the constants at one place and return the change as a record."""
    after, entry = _set(pair, ledger)
    return of_addition(ledger, after, {"norms": [] if entry is None else [dataclasses.asdict(entry)]})


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """One place in both networks."""

    prepared: Prepared
    place: Place
    dense: Stream
    narrow: Stream
    untouched: Ledger
    twins: Ints

    def rows(self, name: str, axis: int, ledger: Ledger) -> Iterator[tuple[Array, Array, Bools, Bools]]:
        """Yield per batch: narrowed rows (n, k), dense rows (n, c), mask of fitted rows, mask of held-out rows.

        Batches that don't take the tensor's branch are skipped.
        """
        first = 0
        found = zip(
            self.dense.masks, self.dense.record([name], self.untouched), self.narrow.record([name], ledger), strict=True
        )
        for mask, goals, slim in (one for one in found if name in one[1]):
            goal = self._kept(goals[name], name, axis, ledger)
            held, real = self._held(goal.shape, axis, first), _real(goal.shape, axis, mask)
            y, t = (np.moveaxis(a, axis, -1).reshape(-1, a.shape[axis]) for a in (slim[name], goal))
            yield y, t, ~held & real, held & real
            first += goal.shape[0]

    def pool(self, name: str, axis: int, ledger: Ledger) -> Ints:
        """Return per channel of the original axis the index of the kept channel that represents it, -1 if none does."""
        marks = [m.labels for m in self.prepared.survey.marks.get(name, ()) if m.axes == (axis,)]
        if not marks:
            return np.arange(self.prepared.survey.facts.shapes[name][axis])
        return pool_of(marks[0], ledger.dead, self.twins)

    def _kept(self, goal: Array, name: str, axis: int, ledger: Ledger) -> Array:
        """Return the dense tensor, narrowed like the other one on all axes except `axis`; clusters are averaged."""
        for mark in self.prepared.survey.marks.get(name, ()):
            if mark.axes != (axis,) and ledger.dead[mark.labels].any():
                goal = narrowed(goal, mark.axes[0], mark.labels, ledger.dead, self.twins)
        return goal

    def _held(self, shape: tuple[int, ...], axis: int, first: int) -> Bools:
        """Return the mask of held-out rows: those of one sample in four, or one row in four of a single sample."""
        total = self.prepared.batches.samples
        count = int(np.prod(shape)) // max(shape[axis], 1)
        if total < 2 or axis == 0:
            return np.asarray(np.arange(count) % FOLDS == FOLDS - 1)
        sample = np.arange(count) // max(count // max(shape[0], 1), 1) + first
        return np.asarray(sample % min(FOLDS, total) == min(FOLDS, total) - 1)


def _real(shape: tuple[int, ...], axis: int, mask: Bools | None) -> Bools:
    """Return the mask of rows that are not padding."""
    count = int(np.prod(shape)) // max(shape[axis], 1)
    fits = mask is not None and axis == len(shape) - 1 and shape[:-1] in (mask.shape, (mask.size,))
    return np.asarray(mask).astype(bool).ravel() if fits else np.ones(count, dtype=bool)


def _set(pair: _Pair, ledger: Ledger) -> tuple[Ledger, Norm | None]:
    """Return the ledger with corrected constants at one place if these pass on held-out rows, and the report entry.

    The entry is None if the activation is unchanged.
    """
    place = pair.place
    pool = pair.pool(place.output, place.axis, ledger)
    fit = held = zero_sums(int(pool.max()) + 1, len(pool))
    for y, t, fitted, apart in pair.rows(place.output, place.axis, ledger):
        fit, held = fit + sums(y[fitted], t[fitted], pool), held + sums(y[apart], t[apart], pool)
    if not (fit.count and np.isfinite(fit.yy).all() and np.isfinite(fit.tt).all()):
        return ledger, None
    shifts = place.shift or place.bias is not None
    affine = repair(fit, pool) if place.kind == "repair" else refit(fit, held, shifts=shifts)
    if max(distance(fit), 0.0 if affine is None else moved(fit, affine)) <= SAME * fit.tt.sum():
        return ledger, None
    before = after = _error(pair, ledger)
    candidate = ledger
    if affine is not None:
        candidate = _written(pair, affine, pool, ledger)
        after = _error(pair, candidate)
    if affine is None or not held.count or not after <= before:  # `not <=` also holds for NaN
        kept = Outcome(status="plain", reason="new constants would not do better on held-out samples")
        return ledger, Norm(node=place.node, kind=place.kind, before=before, after=before, outcome=kept)
    return candidate, Norm(node=place.node, kind=place.kind, before=before, after=after, outcome=Outcome())


def _error(pair: _Pair, ledger: Ledger) -> float:
    """Return the squared error on held-out rows at the judged tensor, as a share of the dense network's energy."""
    name = pair.place.judged
    axis = len(pair.prepared.survey.facts.shapes[name]) - 1
    wrong = energy = 0.0
    pool = pair.pool(name, axis, ledger)
    for y, t, _, held in pair.rows(name, axis, ledger):
        goal = pooled(t, pool, y.shape[1])[held].astype(np.float64)
        wrong += float(np.square(y[held] - goal).sum())
        energy += float(np.square(goal).sum())
    return wrong / energy if energy else wrong


def _written(pair: _Pair, affine: Affine, pool: Ints, ledger: Ledger) -> Ledger:
    """Return the ledger with scale and shift applied to the constants of a place."""
    place, shape = pair.place, (len(pool),)
    alive = _alive(pair, pool, ledger)
    scale, shift = np.ones(shape), np.zeros(shape)
    scale[alive], shift[alive] = affine.scale, affine.shift
    arrays, shifts = dict(ledger.arrays), dict(ledger.shifts)
    arrays[place.scale.param] = _times(pair, place.scale, scale, 0.0, ledger)
    if place.bias is not None:
        arrays[place.bias.param] = _times(pair, place.bias, scale, shift, ledger)
    if place.shift or place.node in shifts:
        extra = shift if place.bias is None else 0.0
        shifts[place.node] = scale * shifts.get(place.node, np.zeros(shape)) + extra
    return dataclasses.replace(ledger, arrays=arrays, shifts=shifts)


def _alive(pair: _Pair, pool: Ints, ledger: Ledger) -> Bools:
    """Return the mask of kept positions of the channel axis."""
    place = pair.place
    for mark in pair.prepared.survey.marks.get(place.output, ()):
        if mark.axes == (place.axis,):
            return ~ledger.dead[mark.labels]
    return np.ones(len(pool), dtype=bool)


def _times(pair: _Pair, part: Part, scale: Floats, shift: Floats | float, ledger: Ledger) -> Array:
    """Return the current value of a constant, scaled and shifted along its channel axis, in its own type."""
    now = ledger.arrays.get(part.param)
    array = weights.original(part.value, pair.prepared.model, pair.prepared.survey) if now is None else now
    shape = [-1 if a == part.axis else 1 for a in range(array.ndim)]
    values = array * scale.reshape(shape) + np.reshape(shift, shape if np.ndim(shift) else [1] * array.ndim)
    limit = float(np.finfo(array.dtype).max)
    return np.asarray(np.clip(values, -limit, limit).astype(array.dtype))
