"""The result for one output: its sums per sample, the distances every output has, the verdict of its kind's measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import exp, inf
from typing import Any

from onnxgrail.core import Bools, Floats
from onnxgrail.fidelity.goals import Hits
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.sums import Sums

TOLD = ("classes", "scores", "tokens")  # kinds of outputs to which labels belong


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """The sums per sample of an output, or of a part of it.

    Attributes:
        output: its name; of several outputs that are judged as one, their names.
        part: its content.
        shape: of the output for one sample.
        sums: (n, k) from the measure of the part, in the order of the samples.
        broken: (n,) mask of samples with values that are NaN or infinite while the reference is finite.
        details: further measures over all samples.
    """

    output: str
    part: Part
    shape: tuple[int, ...]
    sums: Floats
    broken: Bools
    details: Mapping[str, float]

    @property
    def active(self) -> Floats | None:
        """Return (n,) sums of the scores above 0.1, the higher ones of both models; None for other content."""
        return self.sums[:, 1] if self.part.kind == "scores" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The closeness of one output, or a part of it, to the reference by the measure of its kind.

    Attributes:
        kind: classes, scores, tokens, sequences, text, labels, embedding, values or state.
        why: the reason for the kind.
        part: the columns, empty if the whole output is one part.
        measure: name of the measure.
        value: over all samples; None if undefined for these samples.
        interval: 95 % confidence interval of the value, from resampling the samples.
        lowest: the value of the worst sample.
        higher: True if high values are good.
        loss: mean over samples of a continuous loss that orders outputs of all kinds, 0 is perfect.
        loss_name: name of that loss.
        loss_highest: of the worst sample.
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
    """The closeness of one output to the reference; fields are None if they don't apply.

    Attributes:
        name: of the output.
        samples: number of compared samples.
        cosine: mean over samples of the cosine of the flattened rows.
        cosine_min: of the worst sample.
        nmse: squared error over the energy of the reference, 0 is perfect, 1 is as bad as zeros.
        max_abs: largest absolute difference.
        broken: number of values that are NaN or infinite while the reference is finite.
        agreement: share of rows with the same largest entry (logits), or of equal elements (integers).
        kl: mean Kullback-Leibler divergence in nats per row of logits.
        judged: number of samples, or tokens, with a known class.
        top1, top1_reference: share of these samples whose largest score is that class.
        perplexity, perplexity_reference: exp of the mean negative log-likelihood of these tokens.
        verdicts: by the measure of the output's kind, one per part; the worst one first.
        not_compared: content that has no distance; empty if it was compared.
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
    """Convert sums to means, per output; classes are those of an output that holds scores of classes, if one does."""
    verdicts = verdicts or {}
    holds = {name for name, s in sums.items() if s.hits.rows and any(v.kind in TOLD for v in verdicts.get(name, ()))}
    known = {name: s.hits if name in holds or not holds else Hits() for name, s in sums.items()}
    return tuple(_finish(name, s, verdicts.get(name, ()), known[name]) for name, s in sums.items())


def _finish(name: str, s: Sums, verdicts: tuple[Verdict, ...], known: Hits) -> Fidelity:
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
        **_scores(known),
    )


def _scores(known: Hits) -> dict[str, Any]:
    """Return accuracy or perplexity of both models, if classes are known."""
    if not known.rows:
        return {}
    sides = (("", known.right_b, known.loss_b), ("_reference", known.right_a, known.loss_a))
    if not known.texts:
        return {"judged": known.rows, **{f"top1{side}": right / known.rows for side, right, _ in sides}}
    return {"judged": known.rows, **{f"perplexity{side}": _perplexity(loss / known.rows) for side, _, loss in sides}}


def _perplexity(loss: float) -> float:
    return exp(loss) if loss < 700 else inf  # exp would overflow


def entries(results: tuple[Fidelity, ...]) -> list[dict[str, Any]]:
    """Convert results to plain data."""
    return [asdict(result) for result in results]
