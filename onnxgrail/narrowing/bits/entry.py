"""The report entry of a matrix in a few bits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The report entry of one matrix.

    Attributes:
        weight: its name; nodes: that multiply by it.
        bits, block_size: its form.
        rounding: `carried` if each error is made up for by the inputs rounded later, `nearest` if not.
        before, after: squared error of its outputs as a share of their energy: rounded to nearest, and as written; None
            if its inputs were not measured, with the reason.
    """

    weight: str
    nodes: tuple[str, ...]
    bits: int
    block_size: int
    rounding: str
    before: float | None = None
    after: float | None = None
    reason: str = ""
