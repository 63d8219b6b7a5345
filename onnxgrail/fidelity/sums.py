"""Distances between two models' outputs that all kinds of outputs have: per sample, and summed, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

import numpy as np

from onnxgrail.core import Array, Bools, Feed, Floats, Ints
from onnxgrail.errors import ModelError
from onnxgrail.fidelity.goals import Goals, Hits, classes_of, hits
from onnxgrail.fidelity.tables import alike

CLASSES_LIMIT = 200_000
NOT_LOGITS = ("embed", "pool", "hidden", "feature", "state")
PER_SAMPLE = ("dot", "error", "energy", "power", "max_abs", "broken", "rows", "agree", "kl")  # arrays of `Distances`
BLOCK = 2**22  # most values of one output to process at once, to limit the memory for float64 copies


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums over samples of one output; sums of disjoint sets of samples can be merged.

    Attributes:
        samples: rows along the first axis.
        cosine: sum over samples of the cosine of the flattened rows.
        worst: the lowest of these cosines.
        error, energy: sums of squares of the difference and of the reference.
        max_abs: largest absolute difference.
        broken: number of values that are NaN or infinite while the reference is finite.
        rows, agree, kl: for logits, rows along the last axis, rows with the same largest entry, and the sum of the
            Kullback-Leibler divergences in nats; for integer outputs, number of elements and of equal elements.
        real: True if the output is floating point.
        logits: True if `kl` is defined.
        hits: accuracy of both models for rows of logits with known class.
    """

    samples: int = 0
    cosine: float = 0.0
    worst: float = inf
    error: float = 0.0
    energy: float = 0.0
    max_abs: float = 0.0
    broken: int = 0
    rows: int = 0
    agree: int = 0
    kl: float = 0.0
    real: bool = False
    logits: bool = False
    hits: Hits = field(default_factory=Hits)

    def merge(self, other: Sums) -> Sums:
        """Return the sums over both sets of samples."""
        both: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "hits"
        }
        both["hits"] = self.hits.merge(other.hits)
        both["max_abs"] = max(self.max_abs, other.max_abs)
        both["worst"] = min(self.worst, other.worst)
        both["real"], both["logits"] = self.real or other.real, self.logits or other.logits
        return Sums(**both)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Distances:
    """The terms of `Sums`, one number per sample of a batch.

    Attributes:
        dot: sum of the products of both models' values.
        power: sum of squares of the other model's values, as `energy` of the reference's.
    """

    dot: Floats
    error: Floats
    energy: Floats
    power: Floats
    max_abs: Floats
    broken: Ints
    rows: Ints
    agree: Ints
    kl: Floats
    real: bool
    logits: bool
    hits: Hits = field(default_factory=Hits)

    def total(self) -> Sums:
        """Return the sums over the samples."""
        added = ("error", "energy", "broken", "rows", "agree", "kl")
        sums: dict[str, Any] = {name: getattr(self, name).sum().item() for name in added}
        sums["max_abs"] = float(self.max_abs.max(initial=0.0))
        if self.real:
            cosine = np.where(self.broken > 0, 0.0, _cosines(self.dot, self.energy, self.power))
            sums |= {"cosine": cosine.sum().item(), "worst": float(cosine.min(initial=inf))}
        sums |= {"real": self.real, "logits": self.logits, "hits": self.hits}
        return Sums(samples=len(self.rows), **sums)


def add_batch(
    sums: Mapping[str, Sums],
    reference: Feed,
    outputs: Feed,
    *,
    mask: Bools | None = None,
    goals: Goals | None = None,
) -> dict[str, Sums]:
    """Return the sums with one more batch of outputs.

    Args:
        sums: so far, by output name; empty at the start.
        reference: arrays by output name; the samples are the first axis.
        outputs: the same of the other model.
        mask: (B, S) True at real tokens; padded positions of (B, S, ...) outputs are ignored.
        goals: known classes of logits.

    Raises:
        ModelError: an output is missing or differs in shape.
    """
    added = dict(sums)
    for name, wanted, got in pairs(reference, outputs):
        found = measure(wanted, got, name=name, mask=mask, goals=goals)
        added[name] = added.get(name, Sums()).merge(found)
    return added


def pairs(reference: Feed, outputs: Feed) -> list[tuple[str, Array, Array]]:
    """Return the outputs that have a distance, with their values in both models.

    Raises:
        ModelError: an output is missing or differs in shape.
    """
    found = []
    for name, wanted in reference.items():
        if name not in outputs:
            raise ModelError(f"the second model has no output {name!r}", hint=f"It has {', '.join(outputs)}")
        both = alike(wanted, outputs[name])
        if both is None:
            continue
        if both[1].shape != both[0].shape:
            raise ModelError(f"output {name!r}: got shape {list(both[1].shape)}, expected {list(both[0].shape)}")
        found.append((name, *both))
    return found


def measure(wanted: Array, got: Array, *, name: str, mask: Bools | None = None, goals: Goals | None = None) -> Sums:
    """Compute the sums of one batch of one output; arguments as in `distances`."""
    return distances(wanted, got, name=name, mask=mask, goals=goals).total()


def distances(
    wanted: Array, got: Array, *, name: str, mask: Bools | None = None, goals: Goals | None = None, brief: bool = False
) -> Distances:
    """Compute the distances of every sample of a batch; an array without axes is one sample.

    Args:
        wanted: values of the reference, samples first.
        got: values of the other model, of the same shape.
        name: of the output.
        mask: (samples, tokens) True at real tokens.
        goals: known classes of logits.
        brief: leave out what no loss reads: the cosine and the largest difference are NaN.
    """
    a, b = np.atleast_1d(wanted), np.atleast_1d(got)
    whole = wanted.dtype.kind in "biu"
    goals = goals or Goals()
    scores = not whole and (looks_like_logits(name, wanted) or name == goals.scores)
    raw = "logit" in name.lower()
    event = not whole and not scores and goals.labels is not None and _is_event(a, raw=raw)
    shape = (len(a), 2) if event else a.shape
    classes = classes_of(goals, shape, mask) if scores or event else None
    pieces = []
    for places in _places(a):
        runs = []
        for place in places:
            if whole:
                runs.append(_equal(a[place], b[place]))
                continue
            shown = mask[place] if mask is not None and a.shape[:2] == mask.shape else None
            right = None if classes is None else classes[place]
            sides = tuple(side[place].astype(np.float64) for side in (a, b))
            run = _apart(*sides, mask=shown, right=right, scores=scores, brief=brief)
            if event and right is not None:
                both = (_with_other(side, raw=raw) for side in sides)
                run = replace(run, hits=_rows(*both, mask=None, right=right)[-1])
            runs.append(run)
        pieces.append(runs[0] if len(runs) == 1 else _added(runs))
    return pieces[0] if len(pieces) == 1 else _joined(pieces)


def _places(array: Array) -> Iterator[list[tuple[slice, ...]]]:
    """Yield the blocks of samples that are processed at once, of a large sample runs along its first axis."""
    each = max(array.size // max(len(array), 1), 1)
    step, run = max(1, BLOCK // each), max(1, BLOCK * array.shape[1] // each) if array.ndim > 2 else 0
    for start in range(0, max(len(array), 1), step):
        cut = slice(start, start + step)
        long = run and run < array.shape[1]
        yield [(cut, slice(first, first + run)) for first in range(0, array.shape[1], run)] if long else [(cut,)]


def _equal(a: Array, b: Array) -> Distances:
    """Return the distances of whole numbers, which are equal or not, and may be levels of an image."""
    equal, x, y = flat(a == b), flat(a).astype(np.float64), flat(b).astype(np.float64)
    none, rows = np.zeros(len(equal)), np.full(len(equal), equal.shape[1])
    error, energy = (np.einsum("ij,ij->i", side, side) for side in (x - y, x))
    shared: dict[str, Any] = {"error": error, "energy": energy} | dict.fromkeys(("dot", "power", "max_abs", "kl"), none)
    return Distances(**shared, broken=rows * 0, rows=rows, agree=equal.sum(axis=1), real=False, logits=False)


def _apart(a: Floats, b: Floats, *, mask: Bools | None, right: Ints | None, scores: bool, brief: bool) -> Distances:
    if mask is not None:
        a, b = (np.where(widened(mask, a.ndim), side, 0.0) for side in (a, b))
    x, y = flat(a), flat(b)
    bad = np.zeros((len(x), 1), bool) if _is_finite(y) else np.isfinite(x) & ~np.isfinite(y)
    x, y = usable(x, y)
    far = x - y
    rows, agree, kl, known = _rows(a, b, mask=mask, right=right) if scores else (*_nothing(len(a)), Hits())
    left_out = np.full(len(x), np.nan)
    return Distances(
        dot=left_out if brief else np.einsum("ij,ij->i", x, y),
        error=np.einsum("ij,ij->i", far, far),
        energy=np.einsum("ij,ij->i", x, x),
        power=left_out if brief else np.einsum("ij,ij->i", y, y),
        max_abs=left_out if brief else np.maximum(far.max(axis=1, initial=0.0), -far.min(axis=1, initial=0.0)),
        broken=bad.sum(axis=1),
        rows=rows,
        agree=agree,
        kl=kl,
        real=True,
        logits=scores,
        hits=known,
    )


def usable(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return both arrays with zeros where one is not finite: masked logits hold minus infinity, without a distance."""
    if _is_finite(a) and _is_finite(b):
        return a, b
    both = np.isfinite(a) & np.isfinite(b)
    return np.where(both, a, 0.0), np.where(both, b, 0.0)


def widened(mask: Bools, rank: int) -> Bools:
    """Return a mask (samples, tokens) with axes of length 1 after them, for an array of this rank."""
    return mask.reshape(*mask.shape, *([1] * (rank - 2)))


def _is_finite(array: Array) -> bool:
    """Return True if no value is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())  # a sum of finite values can overflow


def flat(array: Array) -> Array:
    """Return one row per sample, also for zero samples."""
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _nothing(count: int) -> tuple[Ints, Ints, Floats]:
    return np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count)


def _joined(pieces: Sequence[Distances]) -> Distances:
    known = Hits()
    for piece in pieces:
        known = known.merge(piece.hits)
    arrays: dict[str, Any] = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in PER_SAMPLE}
    return Distances(**arrays, real=pieces[0].real, logits=pieces[0].logits, hits=known)


def _added(runs: Sequence[Distances]) -> Distances:
    """Return the distances of the same samples, over all runs of their rows."""
    arrays: dict[str, Any] = {name: sum(getattr(run, name) for run in runs) for name in PER_SAMPLE}
    arrays["max_abs"] = np.max([run.max_abs for run in runs], axis=0)
    return replace(_joined(runs), **arrays)


def looks_like_logits(name: str, array: Array) -> bool:
    """Return True if the last axis of an output seems to hold class scores."""
    if array.ndim < 2 or not 2 <= array.shape[-1] <= CLASSES_LIMIT:
        return False
    lower = name.lower()
    return "logit" in lower or (array.ndim == 2 and not any(word in lower for word in NOT_LOGITS))


def _is_event(array: Array, *, raw: bool) -> bool:
    """Return True if an output seems to hold one raw score, or one chance, per sample."""
    return array.size == len(array) > 0 and (raw or bool(array.min() >= 0 and array.max() <= 1))


def _with_other(event: Floats, *, raw: bool) -> Floats:
    """Return the scores (samples, 2) of no event and of the event."""
    one = flat(event)
    return np.concatenate([np.zeros_like(one) if raw else 1 - one, one], axis=1)


def probable(array: Array) -> bool:
    """Return True if the last axis of an output that looks like logits holds probabilities already."""
    return bool((array >= 0).all() and np.allclose(array.sum(-1, dtype=np.float64), 1.0, atol=1e-3))


def cosines(a: Floats, b: Floats) -> Floats:
    """Compute the cosine per row; 1 if both rows are zero, 0 if one is."""
    return _cosines(*(np.einsum("ij,ij->i", *rows) for rows in ((a, b), (a, a), (b, b))))


def _cosines(dot: Floats, energy: Floats, power: Floats) -> Floats:
    """Compute cosines from the sums of the products of two rows, and of the squares of each."""
    scale = np.sqrt(energy) * np.sqrt(power)
    found = np.clip(dot / np.where(scale == 0, 1.0, scale), -1.0, 1.0)
    return np.where((energy == 0) & (power == 0), 1.0, found)


def _rows(a: Floats, b: Floats, *, mask: Bools | None, right: Ints | None) -> tuple[Ints, Ints, Floats, Hits]:
    """Return per sample the number of rows of scores, of agreeing rows, and their divergence; and hits over all."""
    count = len(a)
    rows_a, rows_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    owner = np.repeat(np.arange(count), len(rows_a) // max(count, 1))
    several = right is not None and right.size > len(right)
    known = None if right is None else right.reshape(-1)
    if mask is not None and a.ndim > 2:
        shown = np.broadcast_to(widened(mask, a.ndim - 1), a.shape[:-1]).reshape(-1)
        rows_a, rows_b, owner = rows_a[shown], rows_b[shown], owner[shown]
        known = None if known is None else known[shown]
    if len(rows_a) == 0:
        return *_nothing(count), Hits()
    agree = rows_a.argmax(axis=1) == rows_b.argmax(axis=1)
    shares = probable(rows_a)
    with np.errstate(all="ignore"):
        log_a, log_b = (np.log(np.maximum(r, 1e-30)) if shares else log_softmax(r) for r in (rows_a, rows_b))
        terms = np.exp(log_a) * (log_a - log_b)
    kl = np.where(np.exp(log_a) == 0, 0.0, terms).sum(axis=1)
    found = Hits() if known is None else hits(log_a, log_b, known, texts=several)
    return (
        np.bincount(owner, minlength=count).astype(np.int64),
        np.bincount(owner, weights=agree, minlength=count).astype(np.int64),
        np.bincount(owner, weights=kl, minlength=count).astype(np.float64),
        found,
    )


def log_softmax(rows: Floats) -> Floats:
    """Return the logarithms of the probabilities of each row."""
    shifted = rows - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
