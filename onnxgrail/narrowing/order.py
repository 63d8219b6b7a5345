"""The order in which blocks are decided, such that the network is walked once and each block sees final inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from onnxgrail.calibration.stream.dense import grouped
from onnxgrail.core import Block

WIDE = 3  # a block that spans more other blocks than this is measured on the dense network


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Blocks that are measured together; all nodes before `limit` are final by then."""

    blocks: tuple[Block, ...]
    limit: int


def open_steps(blocks: Sequence[Block], room: Callable[[Block], int], together: int) -> list[Step]:
    """Return the steps of an open loop, in which all blocks are measured in the dense network.

    Args:
        blocks: in any order.
        room: bytes that the statistics of a block take.
        together: bytes that the statistics of one step may take; a single block may take more.

    Returns:
        One step for all blocks if their statistics fit, else steps in the order of the network.
    """
    if sum(map(room, blocks)) <= together:
        return [Step(tuple(blocks), 0)] if blocks else []
    groups = grouped(closed_steps(blocks), lambda step: sum(map(room, step.blocks)), together)
    return [Step(tuple(b for step in group for b in step.blocks), group[0].limit) for group in groups]


def closed_steps(blocks: Sequence[Block]) -> list[Step]:
    """Return the steps of a closed loop: one per block, in the order of the blocks' last consumers.

    Blocks that run alongside many others (a residual stream, a relative bias shared by all layers) are decided first,
    in the dense network: their full width no longer exists after upstream nodes are narrowed.
    """
    wide = [b for b in blocks if b.kind == "stream" or _inside(b, blocks) > WIDE]
    near = sorted((b for b in blocks if all(b is not w for w in wide)), key=lambda b: (b.span[1], b.span[0]))
    ordered = [Step(tuple(wide), 0)] if wide else []
    limit = [0] * len(near)
    lowest = 2**62
    for position in reversed(range(len(near))):
        lowest = min(lowest, near[position].span[0])
        limit[position] = lowest
    return ordered + [Step((b,), limit[position]) for position, b in enumerate(near)]


class Layer(Protocol):
    """A layer that is fitted between blocks."""

    @property
    def span(self) -> tuple[int, int]:
        """Return the positions of its first and last node."""
        ...


L = TypeVar("L", bound=Layer)


@dataclass(frozen=True, slots=True, eq=False)
class Turn(Generic[L]):
    """Blocks that are decided together, the layers that are fitted next, and the position where the next turn begins.

    `limit` is 0 for the last turn.
    """

    blocks: tuple[Block, ...]
    layers: tuple[L, ...]
    limit: int


def turns(blocks: Sequence[Block], layers: Sequence[L]) -> list[Turn[L]]:
    """Return turns in which every layer follows the decisions on all blocks that begin before it.

    Blocks are decided no earlier than needed.

    Args:
        blocks: in any order.
        layers: in the order of the network.
    """
    left = sorted(blocks, key=lambda b: (b.span[1], b.span[0]))
    found: list[tuple[list[Block], list[L]]] = []
    for layer in layers:
        now = [b for b in left if b.span[0] <= layer.span[1]]
        left = [b for b in left if b.span[0] > layer.span[1]]
        if now or not found:
            found.append((now, []))
        found[-1][1].append(layer)
    found += [([b], []) for b in left]
    made: list[Turn[L]] = []
    limit = 0
    for some, following in reversed(found):
        made.append(Turn(tuple(some), tuple(following), limit))
        begins = [*(b.span[0] for b in some), *(layer.span[0] for layer in following)]
        limit = min([limit, *begins] if limit else begins)
    return made[::-1]


def _inside(block: Block, blocks: Sequence[Block]) -> int:
    return sum(block.span[0] <= b.span[0] and b.span[1] <= block.span[1] for b in blocks if b is not block)
