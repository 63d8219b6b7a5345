"""The result of an allocation, for the run and for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onnxgrail.allocation.found import Found, found_of
from onnxgrail.allocation.measures import measure_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Block, Recipe
from onnxgrail.graph.bits.plan import FLOAT
from onnxgrail.machine.amounts import Target
from onnxgrail.machine.steps.codec import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A target in numbers: the cost of the original, the limit, and the cost at the chosen widths."""

    target: Target
    before: float
    limit: float
    found: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """The effect of rounding on one block: requested width, chosen width, and the parameters the difference costs.

    `multiple` is the largest divisor of `--round-to` that divides the chosen width in features.
    """

    block: str
    units: int
    asked: float
    kept: int
    multiple: int
    params: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Measurements of one block on the original model.

    Attributes:
        points: (units kept, relative squared error of its consumers' outputs).
        effect: error of the model's outputs with half of this block, and nothing else, removed.
    """

    block: str
    units: int
    points: tuple[tuple[int, float], ...]
    effect: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Allocation:
    """The widths of all blocks, and how they were chosen.

    Attributes:
        asked, used: schedules; they differ if the request was `auto`.
        widths: block name -> units that stay.
        rounding: one per block.
        budget: None if a ratio was given.
        note: a message for the user.
        curves: the error of each block over its width, if measured.
        found: the search that found the widths, if there was one.
        bits: weight -> its bits, if these count for the size; 32 for a weight that keeps its numbers.
        block_size: weights that share a scale then.
    """

    asked: str
    used: str
    widths: Mapping[str, int]
    rounding: tuple[Rounding, ...]
    budget: Budget | None = None
    note: str = ""
    curves: tuple[Curve, ...] = ()
    found: Found | None = None
    bits: Mapping[str, int] = field(default_factory=dict)
    block_size: int | None = None

    def narrows(self, block: Block) -> bool:
        """Return True if a block loses units."""
        return self.widths[block.name] < block.units

    @property
    def lowers(self) -> bool:
        """Return True if a weight has fewer bits than before."""
        return any(bits < FLOAT for bits in self.bits.values())

    @property
    def sheds(self) -> bool:
        """Return True if the file is small enough only because notes of its exporter go."""
        if self.budget is None or self.budget.target.metric != "size" or self.lowers:
            return False
        whole = all(row.kept == row.units for row in self.rounding)
        return whole and self.budget.found <= self.budget.limit < self.budget.before

    def entry(self) -> dict[str, Any]:
        """Return the entry for the report."""
        return {
            "asked": self.asked,
            "used": self.used,
            "note": self.note,
            "rounding": [asdict(row) for row in self.rounding],
            "curves": [asdict(curve) for curve in self.curves],
            "bits": dict(self.bits),
            "search": None if self.found is None else asdict(self.found),
        }


def of_allocation(allocation: Allocation) -> Record:
    """Convert an allocation to a record."""
    return Record(notes=asdict(allocation))


def allocation_of(record: Record) -> Allocation:
    """Convert a record of `of_allocation` back."""
    notes = dict(record.notes)
    budget, found = notes.pop("budget"), notes.pop("found", None)
    return Allocation(
        rounding=tuple(Rounding(**row) for row in notes.pop("rounding")),
        curves=tuple(_curve(**row) for row in notes.pop("curves", ())),
        found=None if found is None else found_of(found),
        budget=None if budget is None else Budget(**{**budget, "target": Target(**budget["target"])}),
        **notes,
    )


def _curve(*, points: Sequence[Sequence[float]], **rest: Any) -> Curve:
    """Convert a curve from a file, where pairs have become lists."""
    return Curve(points=tuple((int(kept), float(error)) for kept, error in points), **rest)


def rounding_table(
    blocks: Sequence[Block],
    widths: Mapping[str, int],
    ideal: Mapping[str, float],
    params: Mapping[str, float],
    round_to: int,
) -> tuple[Rounding, ...]:
    """Return the effect of rounding on each block.

    Args:
        blocks: the blocks.
        widths: block name to chosen width.
        ideal: block name to requested width.
        params: block name to the parameters of one unit.
        round_to: wanted multiple of the width in features.
    """
    return tuple(
        Rounding(
            block=b.name,
            units=b.units,
            asked=round(ideal[b.name], 2),
            kept=widths[b.name],
            multiple=math.gcd(widths[b.name] * b.unit_size, round_to),
            params=round((widths[b.name] - ideal[b.name]) * params[b.name]),
        )
        for b in blocks
    )


def at_widths(
    prepared: Prepared, blocks: Sequence[Block], recipe: Recipe, widths: Mapping[str, int], ideal: Mapping[str, float]
) -> Allocation:
    """Return the allocation of given widths.

    Args:
        prepared: the model.
        blocks: the blocks that may be narrowed.
        recipe: the choices.
        widths: block name to units that stay.
        ideal: block name to the width before rounding.
    """
    meter = measure_of(prepared, "params").meter
    weighs = {b.name: _slope(b, widths, meter.near) for b in blocks}
    return Allocation(
        asked=recipe.allocate,
        used="uniform" if recipe.allocate == "auto" else recipe.allocate,
        widths=widths,
        rounding=rounding_table(blocks, widths, ideal, weighs, recipe.round_to),
    )


def _slope(block: Block, widths: Mapping[str, int], near: Callable[[Block, int, Mapping[str, int]], float]) -> float:
    """Return the parameters of one unit of a block, with the other blocks at their widths."""
    kept = widths[block.name]
    other = kept - 1 if kept == block.units else kept + 1
    return abs(near(block, other, widths) - near(block, kept, widths))
