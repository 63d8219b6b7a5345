"""The requested and the achieved share of parameters or units removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from onnxgrail.allocation.measures import measure_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Block, Recipe

Of = Literal["blocks", "units", "layers", "model"]
"""The whole that a share refers to: parameters in blocks that can be narrowed, their units, parameters in layers with
replaceable matrices, or all parameters of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A share removed; `asked` is None if no share was requested, `total` is the size of the whole."""

    of: Of
    asked: float | None
    achieved: float
    total: int


def of_blocks(prepared: Prepared, recipe: Recipe, blocks: Sequence[Block], widths: Mapping[str, int]) -> Share:
    """Return the share of the given blocks that is removed.

    It is a share of their units if `unit_ratio` was requested, else of the parameters in the blocks, each shared weight
    counted once.

    Args:
        prepared: the model.
        recipe: `unit_ratio` or `ratio`.
        blocks: the blocks.
        widths: block name to units that stay; blocks that are not named keep all.
    """
    if recipe.unit_ratio is not None:
        units = sum(b.units for b in blocks)
        gone = sum(b.units - widths.get(b.name, b.units) for b in blocks)
        return Share(of="units", asked=recipe.unit_ratio, achieved=gone / max(units, 1), total=units)
    saved = measure_of(prepared, "params").meter.saved
    whole = saved({})
    inside, lost = (round(saved(kept) - whole) for kept in ({b.name: 0 for b in blocks}, widths))
    return Share(of="blocks", asked=recipe.ratio, achieved=lost / max(inside, 1), total=inside)
