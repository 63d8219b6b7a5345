"""In which order blocks are decided, so that each is measured behind final nodes and the network is walked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxgrail.core import Block

WIDE = 3  # a block that spans more other blocks than this is measured on the dense network


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Blocks that are measured together, and the node in front of which everything is final by then."""

    blocks: tuple[Block, ...]
    limit: int


def steps(blocks: Sequence[Block], *, closed_loop: bool) -> list[Step]:
    """Open loop: one step for all.  Closed loop: a step per block, in order of its last consumer.

    Blocks that run alongside many others (a residual stream, a relative bias shared by all layers) are decided first,
    on the dense network: their full width exists nowhere once the network in front is narrowed.
    """
    if not blocks:
        return []
    if not closed_loop:
        return [Step(tuple(blocks), 0)]
    wide = [b for b in blocks if b.kind == "stream" or _inside(b, blocks) > WIDE]
    near = sorted((b for b in blocks if all(b is not w for w in wide)), key=lambda b: (b.span[1], b.span[0]))
    ordered = [Step(tuple(wide), 0)] if wide else []
    limit = [0] * len(near)
    lowest = 2**62
    for position in reversed(range(len(near))):
        lowest = min(lowest, near[position].span[0])
        limit[position] = lowest
    return ordered + [Step((b,), limit[position]) for position, b in enumerate(near)]


def _inside(block: Block, blocks: Sequence[Block]) -> int:
    return sum(block.span[0] <= b.span[0] and b.span[1] <= block.span[1] for b in blocks if b is not block)
