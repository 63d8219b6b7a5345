"""The result of a search, for the report and for killed runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onnxgrail.fidelity.loss import Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The measured loss of a candidate.

    Attributes:
        output, part: the output that decides, and its columns if it has several parts.
        name: of the loss; kind: of the output.
        samples: that judged it.
        mean, bound: over the samples, and its one-sided 95 % upper bound.
        agreement: counted agreement beside it: its measure, value, interval, and samples that would settle it.
        bare: number of samples in which neither model has anything to compare, such as a score above 0.1.
        alike: True if the original gives all samples the same class.
        scale: factor of what `name` says, so that losses of all kinds mean as much.
    """

    output: str
    part: str
    name: str
    kind: str
    samples: int
    mean: float
    bound: float
    agreement: Mapping[str, Any]
    bare: int = 0
    alike: bool = False
    scale: float = 1.0

    @property
    def scarce(self) -> str:
        """Return what samples lack that are all of one class, or of which most are bare; empty without any lack."""
        if self.alike:
            return f"all {self.samples} samples are of one class"
        most = 2 * self.bare > self.samples
        return f"{self.bare} of {self.samples} samples have nothing in them that the loss compares" if most else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A model that was decided, fitted and judged.

    Attributes:
        steps: its place on the path.
        cost: of the model.
        predicted: loss from the losses of single blocks.
        loss: measured.
    """

    steps: int
    cost: float
    predicted: float
    loss: Judged


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The result of a search for the widths that cost least within a loss.

    Attributes:
        limit: largest loss.
        minimize: what the search made small; before, cost: of the original and of the found widths.
        crossed: True if every sample was judged by a candidate that was fitted without it.
        tried: the candidates, in order; chosen: the number of the found one, None if none holds.
        next_limit, next_cost: a larger loss, and the cost that a candidate had with it, or that is predicted for it;
            None if there is neither.
        cheapest: the smallest step: block, width, units; None if no block has a step.
        key: names the found widths in the folder of a run that can be continued.
        spared: weights with more bits in all candidates than `--quantize` gives, with the reason: 16 where it gives 8,
            or 8 that a runtime converts; for `fp16`, the nodes that stay in float32.
        ended: True if the search has taken `budget_seconds`, so that it may have gone further with more.
    """

    limit: float
    minimize: str
    before: float
    cost: float
    crossed: bool
    tried: tuple[Candidate, ...]
    chosen: int | None
    next_limit: float | None = None
    next_cost: float | None = None
    cheapest: tuple[str, int, int] | None = None
    key: str = ""
    spared: Mapping[str, str] = field(default_factory=dict)
    ended: bool = False

    @property
    def loss(self) -> Judged | None:
        """Return the loss of the found widths."""
        return None if self.chosen is None else self.tried[self.chosen].loss


def found_of(entry: Mapping[str, Any]) -> Found:
    """Convert plain data of a `Found` back."""
    tried = tuple(Candidate(**{**row, "loss": Judged(**row["loss"])}) for row in entry["tried"])
    cheapest = entry["cheapest"]
    cheapest = None if cheapest is None else tuple(cheapest)
    return Found(**{**entry, "tried": tried, "cheapest": cheapest})


def rounded_up(loss: float) -> float:
    """Return a positive loss with two digits, no smaller; at most 1, which outputs that are not finite have."""
    loss = min(loss, 1.0)
    unit = 10.0 ** (math.floor(math.log10(loss)) - 1)
    return math.ceil(loss / unit) * unit


def judged_of(loss: Loss) -> Judged:
    """Convert a loss to the plain numbers of a report."""
    agreement = loss.agreement
    return Judged(
        output=loss.output,
        part=loss.part,
        name=loss.name,
        kind=loss.kind,
        samples=agreement.samples,
        mean=loss.mean,
        bound=loss.bound,
        agreement={**asdict(agreement), "settled_by": agreement.settled_by()},
        bare=loss.bare,
        alike=loss.alike,
        scale=loss.scale,
    )
