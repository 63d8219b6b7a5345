"""Losses of a candidate on samples that judge it: one continuous number per sample and output, and its upper bound.

A count of right answers says little on few samples: no error in 48 allows an error rate of 6 %. A continuous loss
changes with every sample, so that its mean has a useful bound. The losses of all kinds of outputs are scaled to each
other; `docs/loss.md` has the formulas and the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity.intervals import unseen_share, upper_bound
from onnxgrail.fidelity.measures import Measure, measure_of, unread
from onnxgrail.fidelity.result import Table, Verdict
from onnxgrail.fidelity.tally import Tally
from onnxgrail.fidelity.verdicts import verdict_of
from onnxgrail.fidelity.words import SHARES

__all__ = ["AGREES", "Agreement", "Loss", "losses_of", "upper_bound", "worst_loss"]

AGREES = 0.98  # of counted things, at a loss of 1 %
RELATIVE = "relative perplexity, exp(KL) - 1"
MOST = 10**9  # more samples than this settle nothing
SURE = 2.0  # other samples halve the bound of half of the samples in one case of 200, also if few lose much
FINER = (2.0, 5.0)  # times as many numbers as the next level of a pyramid, whose sides are half as long, rounded up


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """The counted agreement of an output, or the value of its measure if nothing is counted.

    Attributes:
        measure: its name.
        value: over all samples; None if undefined for these samples.
        interval: its 95 % confidence interval.
        higher: True if high values are good.
        samples: number of samples.
        counted: True if the value is a share.
    """

    measure: str
    value: float | None
    interval: tuple[float, float] | None
    higher: bool
    samples: int
    counted: bool

    def settled_by(self) -> int | None:
        """Return the number of samples with which the interval would leave out `AGREES`, for an unchanged value.

        Returns:
            At least the present number; None if the value is `AGREES` or nothing is counted.
        """
        if not self.counted or self.value is None or self.interval is None or not self.samples:
            return None
        low, high = self.interval
        if low > AGREES or high < AGREES:
            return self.samples
        gap = abs(self.value - AGREES)
        if gap == 0:
            return None
        width = self.value - low if self.value > AGREES else high - self.value
        least = self.samples * (width / gap) ** 2
        if self.value in (0.0, 1.0):  # an interval that has shrunk to one side is as wide as 1 / n, not its root
            least = self.samples * width / gap
        return math.ceil(least) if least < MOST else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loss:
    """The loss of an output, or of a part of it, against the original.

    Attributes:
        output: its name; the names of all levels of a pyramid.
        part: its columns, empty if the whole output is one part.
        name: of the loss.
        kind: of the output.
        values: (samples,) losses in 0..1 after scaling, in the order of the samples.
        mean: over the samples.
        bound: one-sided 95 % upper bound of the mean, at most 1; infinity if the output has values that are NaN or
            infinite while the reference is finite.
        agreement: counted agreement beside it.
        bare: number of samples in which neither model has anything to compare, such as a score above 0.1.
        alike: True if the original gives all samples the same class.
        scale: factor of what `name` says, so that losses of all kinds mean as much.
    """

    output: str
    part: str
    name: str
    kind: str
    values: Floats
    mean: float
    bound: float
    agreement: Agreement
    bare: int = 0
    alike: bool = False
    scale: float = 1.0


def losses_of(tally: Tally) -> tuple[Loss, ...]:
    """Return the losses of all outputs, the worst one first.

    Outputs of one kind at several resolutions, as detectors give, are judged as one: each alone shows few objects.
    States that are fed back count only if there are no other outputs: their effect is in the other outputs.  Scores of
    which none is above 0.1 in any sample, and boxes beside them, count only if there are no others.  Labels that are
    equal on all samples prove little; where there are no other outputs, their bound says so.
    """
    tables, _ = _judged(tally)
    return _losses(tables)


def _losses(tables: Sequence[Table]) -> tuple[Loss, ...]:
    alone = all(measure_of(table.part, table.sums).stepped for table in tables)
    return tuple(sorted((_loss(table, alone=alone) for table in tables), key=_badness, reverse=True))


def _judged(tally: Tally) -> tuple[list[Table], bool]:
    """Return the tables that count, and True if these also count when more samples follow."""
    tables = list(_pooled(tally.tables()))
    others = [table for table in tables if table.part.kind != "state"]
    known = [table for table in others if not unread(table.part, table.sums)]
    return known or others or tables, bool(known)


def worst_loss(tally: Tally) -> Loss | None:
    """Return the loss of the output that decides: the one with the largest bound. None if nothing is comparable."""
    return next(iter(losses_of(tally)), None)


def beyond(tally: Tally, limit: float, share: float) -> Loss | None:
    """Return the worst loss of the first samples if they show that the bound of all samples exceeds a limit.

    They do if their bound exceeds `SURE` times the limit even if the others lose nothing.

    Args:
        tally: of the first samples.
        limit: of the bound.
        share: of all samples that these are.

    Returns:
        None if the first samples do not show it, also as long as the content of an output is not known.
    """
    if SURE * limit >= 1 or not tally.known.keys() >= tally.sums.keys():
        return None
    tables, certain = _judged(tally)
    if not certain:
        return None
    worst = _losses(tables)[0]
    others = round(len(worst.values) * (1 / share - 1))
    return worst if upper_bound(np.pad(worst.values, (0, others)), most=1.0) > SURE * limit else None


def _pooled(tables: Sequence[Table]) -> Iterator[Table]:
    """Yield one table for the levels of a pyramid, and all other tables as they are.

    Only scores, and boxes at positions with a score, are joined: they are sums over what is found, wherever that is.
    """
    alike: dict[tuple[object, ...], list[Table]] = {}
    for table in tables:
        part, width = table.part, table.sums.shape[1]
        summed = part.kind == "scores" or (part.kind == "values" and width > 2)
        content = (part.kind, part.form, part.axis, part.columns, part.gate, part.rows, part.dominant)
        key = (len(table.shape), table.sums.shape, *content) if summed else (table.output, *content)
        alike.setdefault(key, []).append(table)
    for group in alike.values():
        yield from map(_joined, _levels(group))


def _levels(group: Sequence[Table]) -> list[Sequence[Table]]:
    """Return which tables are levels of one pyramid: the first ones of each size, the second ones, and so on.

    Outputs are often ordered by level (scores, boxes, scores, boxes), or by content (scores, scores, boxes, boxes).
    """
    sizes: dict[tuple[int, ...], list[Table]] = {}
    for table in sorted(group, key=lambda table: -math.prod(table.shape)):
        sizes.setdefault(table.shape, []).append(table)
    steps = [(math.prod(a) / max(math.prod(b), 1), a, b) for a, b in pairwise(sizes)]
    halved = all(FINER[0] < ratio < FINER[1] and all(map(int.__ge__, a, b)) for ratio, a, b in steps)
    even = len({len(some) for some in sizes.values()}) == 1
    return list(zip(*sizes.values(), strict=True)) if halved and even else [(table,) for table in group]


def _joined(levels: Sequence[Table]) -> Table:
    """Return the sums over the levels of a pyramid."""
    if len(levels) == 1:
        return levels[0]
    broken = np.logical_or.reduce([table.broken for table in levels])
    names = ", ".join(table.output for table in levels)
    return replace(levels[0], output=names, sums=np.sum([table.sums for table in levels], axis=0), broken=broken)


def _badness(loss: Loss) -> tuple[float, float]:
    return loss.bound, loss.mean


def _loss(table: Table, *, alone: bool) -> Loss:
    measure = measure_of(table.part, table.sums)
    verdict = verdict_of(table.part, table.sums, {}, broken=False)
    values, bare = _scaled(table, measure)
    broken = bool(table.broken.any() or np.isnan(values).any())
    values = np.where(table.broken | np.isnan(values), 1.0, values)
    return Loss(
        output=table.output,
        part=verdict.part,
        name=RELATIVE if table.part.kind == "tokens" else measure.loss_of(table.part),
        kind=table.part.kind,
        values=values,
        mean=float(values.mean()) if len(values) else 0.0,
        bound=math.inf if broken else _bound(table, measure, values, alone=alone),
        agreement=_agreement(verdict, len(values)),
        bare=bare,
        alike="one_class" in verdict.details,
        scale=measure.scale,
    )


def _bound(table: Table, measure: Measure, values: Floats, *, alone: bool) -> float:
    """Return the upper bound of the mean loss; where things are only counted, it is not 0 because all are equal."""
    if alone and measure.stepped and measure.trials and len(values) and not values.any():
        return measure.scale * unseen_share(measure.trials(table.sums.sum(axis=0)))
    return min(1.0, upper_bound(values, most=1.0))


def _scaled(table: Table, measure: Measure) -> tuple[Floats, int]:
    """Return losses in 0..1, NaN if one cannot be computed, and the number of samples with nothing to compare.

    Such a sample has no loss.  If all are, nothing is known: the loss is 1.
    """
    losses = measure.losses(table.sums)
    bare = np.isnan(losses) & np.isfinite(table.sums).all(axis=1)
    losses = np.where(bare, np.inf if bare.all() else 0.0, losses)
    if table.part.kind == "tokens":
        losses = np.expm1(np.minimum(losses, 700.0))  # exp would overflow
    return np.clip(measure.scale * losses, 0.0, 1.0), int(bare.sum())


def _agreement(verdict: Verdict, samples: int) -> Agreement:
    return Agreement(
        measure=verdict.measure,
        value=verdict.value,
        interval=verdict.interval,
        higher=verdict.higher,
        samples=samples,
        counted=verdict.kind in SHARES,
    )
