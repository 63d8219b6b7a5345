"""Converts sums per sample to verdicts: value, interval, worst sample; and finds the worst output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity import intervals
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.measures import Measure, measure_of
from onnxgrail.fidelity.measures.scores import SCORES
from onnxgrail.fidelity.result import Fidelity, Verdict


def verdict_of(part: Part, table: Floats, details: Mapping[str, float], *, broken: bool) -> Verdict:
    """Compute the verdict on a part of an output from the sums of all samples.

    Args:
        part: its content.
        table: (n, k) sums per sample, from its measure.
        details: further measures.
        broken: True if the output has values that are NaN or infinite while the reference is finite.
    """
    measure = measure_of(part, table)
    value, losses = float(measure.value(table.sum(axis=0))), measure.losses(table)
    losses = losses[~np.isnan(losses)]
    lowest = measure.worst(table)
    lowest = lowest[np.isfinite(lowest)]
    common: dict[str, Any] = {
        "kind": part.kind,
        "why": part.why,
        "part": _columns(part),
        "measure": _name(part, measure),
        "higher": measure.higher,
        "loss_name": measure.loss_of(part),
    }
    if broken:
        return Verdict(**common, value=None, loss=np.inf, loss_highest=np.inf, details={"broken": 1.0})
    return Verdict(
        **common,
        value=None if np.isnan(value) else value,
        interval=None if np.isnan(value) else _interval(measure, table, value),
        lowest=None if not len(lowest) else float(lowest.min() if measure.higher else lowest.max()),
        loss=float(losses.mean()) if len(losses) else None,
        loss_highest=float(losses.max()) if len(losses) else None,
        details={**measure.details(table), **details},
    )


def _interval(measure: Measure, table: Floats, value: float) -> tuple[float, float] | None:
    """Return the union of the intervals by count and by resampling; resampling underestimates for few counts."""
    trials = measure.trials(table.sum(axis=0)) if measure.trials else 0.0
    counted = intervals.of_count(value * trials, trials)
    drawn = None if measure.counted else intervals.of_samples(table, measure.value)
    both = [interval for interval in (counted, drawn) if interval is not None]
    return (min(low for low, _ in both), max(high for _, high in both)) if both else None


def _name(part: Part, measure: Measure) -> str:
    if not part.rows or measure is not SCORES:
        return measure.name
    if part.dominant is None:
        return "agreement of the highest class per position"
    return f"F1 of positions that are not of class {part.dominant}"


def _columns(part: Part) -> str:
    """Describe the columns of a part."""
    if part.columns is None:
        return ""
    first, last = part.columns[0], part.columns[-1]
    if len(part.columns) == 1:
        return f"column {first}"
    if len(part.columns) == last - first + 1:
        return f"columns {first} to {last}"
    return f"{len(part.columns)} columns from {first} to {last}"


def rank(verdict: Verdict) -> float:
    """Return a number that orders verdicts of all kinds: 0 for perfect, infinity for values that are not numbers.

    It is the loss, or the certain loss of a share if that is more: scores may move little and still cross the
    threshold.
    """
    loss = -1.0 if verdict.loss is None else verdict.loss
    if verdict.kind == "tokens" and np.isfinite(loss):
        return float(1 - np.exp(-loss))
    if verdict.higher and verdict.interval is not None:
        return max(loss, 1 - verdict.interval[1])
    return loss


def worst(results: Sequence[Fidelity]) -> tuple[str, Verdict] | None:
    """Return the output that is furthest from the reference, with its verdict.

    States that are fed back count only if there are no other outputs: their effect is in the other outputs.
    """
    every = [(result.name, verdict) for result in results for verdict in result.verdicts]
    others = [one for one in every if one[1].kind != "state"]
    return max(others or every, key=lambda one: rank(one[1]), default=None)


def headline(results: Sequence[Fidelity]) -> dict[str, Any] | None:
    """Return the worst output and its verdict as plain data, None if no output has a distance."""
    found = worst(results)
    return None if found is None else {"output": found[0], **asdict(found[1])}
