"""The order in which blocks are decided, and the processes that decide them.

The network is walked once, and each block sees final inputs. Blocks that do not depend on each other are decided at the
same time, each by a process of its own; one that takes as long as all others is decided by several together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from onnxgrail.algebra.solve.shared import crew_of, together
from onnxgrail.calibration.stream.dense import grouped
from onnxgrail.calibration.stream.probing import same
from onnxgrail.core import Block, Probe
from onnxgrail.machine.group.sums import FIRST, Group, Owners

WIDE = 3  # a block that spans more other blocks than this is measured on the dense network
JOINT = 2**33  # multiply-accumulates of a solve, about 0.2 s, from which several processes are quicker than one


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


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """Blocks in waves that are decided one after the other, and the processes that decide each block.

    Attributes:
        waves: in the order of the blocks; no block of a wave reads weights that another one of it changes.
        owners: by name of the block; the first process if there is none.
    """

    waves: Sequence[Sequence[Block]]
    owners: Mapping[str, Owners] = field(default_factory=dict)

    def of(self, block: Block) -> Owners:
        """Return the processes that decide a block."""
        return self.owners.get(block.name, FIRST)


def waves(blocks: Sequence[Block], *, producers: bool) -> list[list[Block]]:
    """Cut blocks, in the order in which they are decided, into runs of blocks that do not depend on each other.

    Args:
        blocks: as above.
        producers: True if decisions read all weights of a block, False if they read those of its consumers only.
    """
    found: list[list[Block]] = []
    changed: set[str] = set()
    for block in blocks:
        read = {slot.param for slot in (block.slots if producers else block.consumers)}
        if not found or read & changed:
            found.append([])
            changed = set()
        found[-1].append(block)
        changed |= {slot.param for slot in block.slots}
    return found


def deal(
    some: Sequence[Sequence[Block]],
    cost: Callable[[Block], float],
    probes: Callable[[Block], Sequence[Probe]],
    group: Group,
) -> Deal:
    """Return the processes that decide the blocks of each wave, such that all of these are ready at the same time.

    All processes must call it.

    Args:
        some: waves of blocks.
        cost: multiply-accumulates of deciding a block.
        probes: of a block; blocks with equal ones are decided by the same process.
        group: the processes.
    """
    crew = crew_of(group)
    family = _families([block for wave in some for block in wave], probes)
    placed: dict[int, Owners] = {}
    for wave in some:
        costs: dict[int, float] = {}
        for block in wave:
            costs[family[block.name]] = costs.get(family[block.name], 0.0) + cost(block)
        loads = [0.0] * group.size
        for number in costs.keys() & placed.keys():
            loads[placed[number].ranks.start] += costs[number]
        for number in sorted(costs.keys() - placed.keys(), key=lambda f: (-costs[f], f)):
            if costs[number] >= JOINT and costs[number] * crew >= 2 * sum(costs.values()):
                placed[number] = Owners(range(crew))
                continue
            rank = loads.index(min(loads))
            loads[rank] += costs[number]
            placed[number] = Owners(range(rank, rank + 1))
    return Deal(some, {name: placed[number] for name, number in family.items()})


def owners_of(products: int, group: Group) -> Owners:
    """Return the processes that solve a system of so many multiply-accumulates; all processes must call it."""
    return Owners(range(crew_of(group))) if products >= JOINT and group.size > 1 else FIRST


def jointly(group: Group, owners: Owners) -> AbstractContextManager[None]:
    """Share large products within a with-block, if several processes execute it."""
    return together(group, len(owners.ranks))


def _families(blocks: Sequence[Block], probes: Callable[[Block], Sequence[Probe]]) -> dict[str, int]:
    """Return a number per block, equal for blocks that read the same statistics."""
    found: dict[str, int] = {}
    readers: dict[tuple[object, ...], int] = {}
    for number, block in enumerate(blocks):
        mine = [same(probe) for probe in probes(block)]
        joined = {readers[key] for key in mine if key in readers} | {number}
        least = min(joined)
        found = {name: least if one in joined else one for name, one in found.items()} | {block.name: least}
        readers = {key: least if one in joined else one for key, one in readers.items()} | dict.fromkeys(mine, least)
    return found


def _inside(block: Block, blocks: Sequence[Block]) -> int:
    return sum(block.span[0] <= b.span[0] and b.span[1] <= block.span[1] for b in blocks if b is not block)
