"""How close one model's outputs are to another's, summed batch by batch in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import exp, inf
from typing import Any

import numpy as np

from onnxgrail.core import Array, Bools, Feed, Floats
from onnxgrail.errors import ModelError
from onnxgrail.goals import Goals, Hits, classes_of, hits

CLASSES_LIMIT = 200_000
NOT_LOGITS = ("embed", "pool", "hidden", "feature", "state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Sums over samples of one output; adding two gives the sums over both sets of samples.

    Attributes:
        samples: rows along the first axis.
        cosine: sum over samples of the cosine of the flattened rows.
        worst: the lowest of them.
        error, energy: sums of squares of the difference and of the reference.
        max_abs: largest absolute difference.
        broken: values that are NaN or infinite where the reference is finite.
        rows, agree, kl: for logits, rows along the last axis, how many agree in their largest entry, and the sum of the
            Kullback-Leibler divergences in nats; for integer outputs, elements and how many are equal.
        real: the output is floating point.
        logits: `kl` means something.
        hits: how both models do at rows of logits whose class is known.
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
        """Sums over both sets of samples."""
        both: dict[str, Any] = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "hits"
        }
        both["hits"] = self.hits.merge(other.hits)
        both["max_abs"] = max(self.max_abs, other.max_abs)
        both["worst"] = min(self.worst, other.worst)
        both["real"], both["logits"] = self.real or other.real, self.logits or other.logits
        return Sums(**both)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """How close one output is to the reference; None where it makes no sense.

    Attributes:
        name: of the output.
        samples: how many were compared.
        cosine: mean over samples of the cosine of the flattened rows.
        cosine_min: of the sample that is worst off.
        nmse: squared error over the energy of the reference, 0 is perfect, 1 is as bad as zeros.
        max_abs: largest absolute difference.
        broken: values that are NaN or infinite where the reference is finite.
        agreement: share of rows with the same largest entry (logits), or of equal elements (integers).
        kl: mean Kullback-Leibler divergence in nats per row of logits.
        judged: samples, or tokens, whose class is known.
        top1, top1_reference: share of these samples whose largest score is that class.
        perplexity, perplexity_reference: exp of the mean negative log-likelihood of these tokens.
    """

    name: str
    samples: int
    cosine: float | None
    nmse: float | None
    max_abs: float | None
    broken: int = 0
    agreement: float | None = None
    kl: float | None = None
    cosine_min: float | None = None
    judged: int = 0
    top1: float | None = None
    top1_reference: float | None = None
    perplexity: float | None = None
    perplexity_reference: float | None = None


def add_batch(
    sums: Mapping[str, Sums],
    reference: Feed,
    outputs: Feed,
    *,
    mask: Bools | None = None,
    goals: Goals | None = None,
) -> dict[str, Sums]:
    """Sums with one more batch of outputs.

    Args:
        sums: so far, by output name; empty at the start.
        reference: arrays by output name; the samples are the first axis.
        outputs: the same of the other model.
        mask: (B, S) True at real tokens; padded positions of (B, S, ...) outputs are left out.
        goals: what logits should say, where that is known.

    Raises:
        ModelError: an output is missing or differs in shape.
    """
    added = dict(sums)
    for name, wanted in reference.items():
        # Sequences and strings have no distance; a scalar may arrive as a numpy number.
        if not isinstance(wanted, np.ndarray | np.generic) or wanted.dtype.kind not in "biufV":
            continue
        got = outputs.get(name)
        if not isinstance(got, np.ndarray | np.generic):
            raise ModelError(f"the second model has no output {name!r}", hint=f"It has {', '.join(outputs)}")
        if got.shape != wanted.shape:
            raise ModelError(f"output {name!r}: got shape {list(got.shape)}, expected {list(wanted.shape)}")
        found = measure(np.asarray(wanted), np.asarray(got), name=name, mask=mask, goals=goals)
        added[name] = added.get(name, Sums()).merge(found)
    return added


def measure(wanted: Array, got: Array, *, name: str, mask: Bools | None = None, goals: Goals | None = None) -> Sums:
    """Sums of one batch of one output, samples first; shapes must agree; `mask` is (samples, tokens)."""
    if wanted.dtype.kind in "biu":
        equal = wanted == got
        return Sums(samples=len(np.atleast_1d(wanted)), rows=int(wanted.size), agree=int(np.count_nonzero(equal)))
    a, b = np.atleast_1d(wanted.astype(np.float64)), np.atleast_1d(got.astype(np.float64))
    if wanted.ndim == 0:
        a, b = a[None], b[None]
    if mask is not None and a.shape[:2] == mask.shape:
        shown = mask.reshape(*mask.shape, *([1] * (a.ndim - 2)))
        a, b = np.where(shown, a, 0.0), np.where(shown, b, 0.0)
    # Minus infinity is what masked logits hold: it carries no distance, only whether the other agrees.
    finite = np.isfinite(a)
    broken = int(np.count_nonzero(finite & ~np.isfinite(b)))
    usable = finite & np.isfinite(b)
    x, y = np.where(usable, a, 0.0), np.where(usable, b, 0.0)
    whole = (
        np.all((finite & np.isfinite(b)) | ~finite, axis=tuple(range(1, a.ndim))) if a.ndim > 1 else usable | ~finite
    )
    cosines = (
        np.where(whole, _cosines(x.reshape(len(a), -1), y.reshape(len(a), -1)), 0.0) if a.size else np.ones(len(a))
    )
    sums = Sums(
        samples=len(a),
        cosine=float(cosines.sum()),
        worst=float(cosines.min(initial=inf)),
        error=float(np.sum((x - y) ** 2)),
        energy=float(np.sum(x**2)),
        max_abs=float(np.max(np.abs(x - y), initial=0.0)),
        broken=broken,
        real=True,
    )
    return sums.merge(_logits(a, b, mask, goals or Goals())) if looks_like_logits(name, wanted) else sums


def looks_like_logits(name: str, array: Array) -> bool:
    """Whether the last axis of an output seems to hold class scores."""
    if array.ndim < 2 or not 2 <= array.shape[-1] <= CLASSES_LIMIT:
        return False
    lower = name.lower()
    return "logit" in lower or (array.ndim == 2 and not any(word in lower for word in NOT_LOGITS))


def probable(array: Array) -> bool:
    """Whether the last axis of an output that looks like logits holds probabilities already."""
    return bool((array >= 0).all() and np.allclose(array.sum(-1, dtype=np.float64), 1.0, atol=1e-3))


def _cosines(a: Floats, b: Floats) -> Floats:
    """Cosine per row; 1 where both rows are zero, 0 where one is."""
    norm_a, norm_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    empty = (norm_a == 0) & (norm_b == 0)
    scale = norm_a * norm_b
    dots = np.einsum("ij,ij->i", a, b)
    return np.where(empty, 1.0, np.clip(dots / np.where(scale == 0, 1.0, scale), -1.0, 1.0))


def _logits(a: Floats, b: Floats, mask: Bools | None, goals: Goals) -> Sums:
    rows_a, rows_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    classes = classes_of(goals, a.shape, mask)
    right = None if classes is None else classes.reshape(-1)
    if mask is not None and a.ndim > 2 and a.shape[:2] == mask.shape:
        shown = np.broadcast_to(mask.reshape(*mask.shape, *([1] * (a.ndim - 3))), a.shape[:-1]).reshape(-1)
        rows_a, rows_b = rows_a[shown], rows_b[shown]
        right = None if right is None else right[shown]
    if len(rows_a) == 0:
        return Sums(logits=True)
    agree = int(np.count_nonzero(rows_a.argmax(axis=1) == rows_b.argmax(axis=1)))
    shares = probable(rows_a)
    with np.errstate(all="ignore"):
        log_a, log_b = (np.log(np.maximum(r, 1e-30)) if shares else _log_softmax(r) for r in (rows_a, rows_b))
        terms = np.exp(log_a) * (log_a - log_b)
    terms = np.where(np.exp(log_a) == 0, 0.0, terms)
    several = classes is not None and classes.size > len(classes)
    known = Hits() if right is None else hits(log_a, log_b, right, texts=several)
    return Sums(rows=len(rows_a), agree=agree, kl=float(terms.sum()), logits=True, hits=known)


def _log_softmax(rows: Floats) -> Floats:
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def finish(sums: Mapping[str, Sums]) -> tuple[Fidelity, ...]:
    """Means out of sums, per output."""
    return tuple(_finish(name, s) for name, s in sums.items())


def _finish(name: str, s: Sums) -> Fidelity:
    agreement = s.agree / s.rows if s.rows else None
    if not s.real:
        return Fidelity(name=name, samples=s.samples, cosine=None, nmse=None, max_abs=None, agreement=agreement)
    nmse = s.error / s.energy if s.energy > 0 else (0.0 if s.error == 0 else float("inf"))
    broken = s.broken > 0
    return Fidelity(
        name=name,
        samples=s.samples,
        cosine=s.cosine / s.samples if s.samples else None,
        cosine_min=s.worst if s.samples else None,
        nmse=float("inf") if broken else nmse,
        max_abs=float("inf") if broken else s.max_abs,
        broken=s.broken,
        agreement=agreement,
        kl=s.kl / s.rows if s.logits and s.rows else None,
        **_scores(s.hits),
    )


def _scores(found: Hits) -> dict[str, Any]:
    """How both models do, where classes are known."""
    if not found.rows:
        return {}
    sides = (("", found.right_b, found.loss_b), ("_reference", found.right_a, found.loss_a))
    if not found.texts:
        return {"judged": found.rows, **{f"top1{side}": right / found.rows for side, right, _ in sides}}
    return {"judged": found.rows, **{f"perplexity{side}": _perplexity(loss / found.rows) for side, _, loss in sides}}


def _perplexity(loss: float) -> float:
    return exp(loss) if loss < 700 else inf  # further off than a float holds


def entries(results: tuple[Fidelity, ...]) -> list[dict[str, Any]]:
    """Results as plain data."""
    return [asdict(result) for result in results]
