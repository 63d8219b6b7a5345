"""What is told about one output: the distances every output has, and the verdict of the measure that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import exp, inf
from typing import Any

from onnxgrail.fidelity.goals import Hits
from onnxgrail.fidelity.sums import Sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How close one output, or a part of it, is to the reference by the measure that suits what it holds.

    Attributes:
        kind: what it holds: classes, scores, tokens, labels, embedding, values or state.
        why: what in the values, the shape or the name says so.
        part: which columns, empty where the whole output is one part.
        measure: name of the measure.
        value: over all samples; None where the samples cannot tell.
        interval: where the value lies with 95 % confidence, from resampling the samples.
        lowest: the value of the sample that is worst off.
        higher: high values are good.
        loss: mean over samples of a continuous loss that orders outputs of all kinds, 0 is perfect.
        loss_name: what that loss is.
        loss_highest: of the sample that is worst off.
        details: further measures by name.
    """

    kind: str
    why: str
    measure: str
    value: float | None
    higher: bool
    part: str = ""
    interval: tuple[float, float] | None = None
    lowest: float | None = None
    loss: float | None = None
    loss_name: str = ""
    loss_highest: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)


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
        verdicts: by the measure that suits the output, or each of its parts; the worst one first.
        not_compared: what it holds that has no distance; empty where it was compared.
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
    verdicts: tuple[Verdict, ...] = ()
    not_compared: str = ""


def finish(sums: Mapping[str, Sums], verdicts: Mapping[str, tuple[Verdict, ...]] | None = None) -> tuple[Fidelity, ...]:
    """Means out of sums, per output."""
    return tuple(_finish(name, s, (verdicts or {}).get(name, ())) for name, s in sums.items())


def _finish(name: str, s: Sums, verdicts: tuple[Verdict, ...]) -> Fidelity:
    common: dict[str, Any] = {
        "name": name,
        "samples": s.samples,
        "agreement": s.agree / s.rows if s.rows else None,
        "verdicts": verdicts,
    }
    if not s.real:
        return Fidelity(**common, cosine=None, nmse=None, max_abs=None)
    nmse = s.error / s.energy if s.energy > 0 else (0.0 if s.error == 0 else inf)
    broken = s.broken > 0
    return Fidelity(
        **common,
        cosine=s.cosine / s.samples if s.samples else None,
        cosine_min=s.worst if s.samples else None,
        nmse=inf if broken else nmse,
        max_abs=inf if broken else s.max_abs,
        broken=s.broken,
        kl=s.kl / s.rows if s.logits and s.rows else None,
        **_scores(s.hits),
    )


def _scores(known: Hits) -> dict[str, Any]:
    """How both models do, where classes are known."""
    if not known.rows:
        return {}
    sides = (("", known.right_b, known.loss_b), ("_reference", known.right_a, known.loss_a))
    if not known.texts:
        return {"judged": known.rows, **{f"top1{side}": right / known.rows for side, right, _ in sides}}
    return {"judged": known.rows, **{f"perplexity{side}": _perplexity(loss / known.rows) for side, _, loss in sides}}


def _perplexity(loss: float) -> float:
    return exp(loss) if loss < 700 else inf  # further off than a float holds


def entries(results: tuple[Fidelity, ...]) -> list[dict[str, Any]]:
    """Results as plain data."""
    return [asdict(result) for result in results]
