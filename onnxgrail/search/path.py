"""A sequence of nested widths from the whole model downwards, each step the one that saves most for its harm.

Pure functions on losses of single blocks and on a cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onnxgrail.allocation.ladders import Cost, Ideal, Widths
from onnxgrail.search.harms import LEAST, Harm

ON_PATH = 0.9  # share of a schedule that is the path
TINY = 1e-12  # harm of a step that was measured as none: such steps go by what they save


@dataclass(frozen=True, slots=True)
class Step:
    """One more narrowing of one block.

    Attributes:
        block: its name.
        width: the new number of units.
        loss: predicted loss of the model after this step and all earlier ones.
        cost: of the model then.
    """

    block: str
    width: int
    loss: float
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """Nested widths: those after n steps lie within those after fewer.

    Attributes:
        full: block name to all of its units.
        before: cost of the whole model.
        steps: in order.
    """

    full: Mapping[str, int]
    before: float
    steps: tuple[Step, ...]

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.steps)

    def widths(self, count: int) -> Widths:
        """Return the widths after the first `count` steps."""
        return {**self.full, **{step.block: step.width for step in self.steps[:count]}}

    def loss(self, count: int) -> float:
        """Return the predicted loss after the first `count` steps."""
        return self.steps[count - 1].loss if count else 0.0

    def cost(self, count: int) -> float:
        """Return the cost after the first `count` steps."""
        return self.steps[count - 1].cost if count else self.before

    def reach(self, loss: float) -> int:
        """Return the largest number of steps whose predicted loss is at most `loss`."""
        return sum(step.loss <= loss for step in self.steps)  # losses never fall


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The paths of least harm through some blocks.

    Attributes:
        harms: losses of the blocks alone.
        cost: of the model at given widths.
        power: see `harms.POWERS`.
        most: largest predicted loss of a path.
    """

    harms: tuple[Harm, ...]
    cost: Cost
    power: float
    most: float

    def without(self, closed: Collection[str] = ()) -> Path:
        """Return the path on which some blocks stay whole; its first step is there even if it exceeds `most`."""
        found = self.within(self.most, closed=closed)
        if found.steps:
            return found
        beyond = self.within(math.inf, closed=closed)
        return replace(beyond, steps=beyond.steps[:1])

    def within(self, most: float, begun: Sequence[Step] = (), closed: Collection[str] = ()) -> Path:
        """Return the path of least harm: a step has the lowest added harm per saved cost, over all blocks and levels.

        Added harms are differences of `loss ** power`, which add up over blocks. A block may go down several levels at
        once, which are then steps of their own. What a step saves falls as its neighbors narrow, so a step is weighed
        again when its turn comes. Levels that save less than the share `LEAST` of the cost are passed over.

        Args:
            most: largest predicted loss; a block whose step would exceed it takes no more.
            begun: steps with which it begins.
            closed: blocks that take no further step.
        """
        full = {harm.block: harm.units for harm in self.harms}
        widths: Widths = full | {step.block: step.width for step in begun}
        spent = {harm.block: _spent(harm, widths[harm.block], self.power) for harm in self.harms}
        before, now = self.cost(full), self.cost(widths)
        waiting: list[tuple[float, int]] = [(0.0, n) for n, harm in enumerate(self.harms) if harm.block not in closed]
        steps: list[Step] = list(begun)

        def saved(block: str, width: int) -> float:
            found = now - self.cost({**widths, block: width})
            return found if found > LEAST * before else 0.0

        while waiting:
            _, number = heapq.heappop(waiting)
            harm = self.harms[number]
            found = _best(harm, widths[harm.block], spent[harm.block], self.power, partial(saved, harm.block))
            if found is None:
                continue
            rate, width = found
            if waiting and rate > waiting[0][0]:
                heapq.heappush(waiting, (rate, number))
                continue
            others, fits = sum(spent.values()) - spent[harm.block], True
            for level, alone in _between(harm, widths[harm.block], width, self.power):
                after = self.cost({**widths, harm.block: level})
                if after >= now:
                    continue  # an odd width can be slower than a wider one
                least = steps[-1].loss if steps else 0.0  # which sums of small and large harms may miss by rounding
                loss = max((others + max(alone, spent[harm.block])) ** (1 / self.power), least)
                fits = loss <= most
                if not fits:
                    break
                widths[harm.block], spent[harm.block], now = level, max(alone, spent[harm.block]), after
                steps.append(Step(harm.block, level, loss, now))
            if fits:
                heapq.heappush(waiting, (rate, number))
        return Path(full, before, tuple(steps))


def _spent(harm: Harm, width: int, power: float) -> float:
    """Return the harm of a block at a width."""
    pairs = zip(harm.levels, harm.losses, strict=True)
    return max((loss**power for level, loss in pairs if level >= width), default=0.0)


def _between(harm: Harm, width: int, least: int, power: float) -> list[tuple[int, float]]:
    """Return the levels below a width down to `least`, with their harms: a jump is made of small steps."""
    pairs = zip(harm.levels, harm.losses, strict=True)
    return [(level, loss**power) for level, loss in pairs if least <= level < width]


def _best(
    harm: Harm, width: int, spent: float, power: float, saved: Callable[[int], float]
) -> tuple[float, int] | None:
    """Return the lowest harm per saved cost that a block offers, and the width then; None if no width saves."""
    found: tuple[float, int] | None = None
    for level, loss in zip(harm.levels, harm.losses, strict=True):
        less = saved(level) if level < width else 0.0
        rate = max(loss**power - spent, TINY) / less if less > 0 else 0.0
        if less > 0 and (found is None or rate < found[0]):
            found = rate, level
    return found


def schedule_of(path: Path) -> Ideal:
    """Return the schedule that follows a path, and after its end takes all blocks down to nothing."""
    least = path.widths(len(path))

    def ideal(s: float) -> dict[str, float]:
        place = min(s / ON_PATH, 1.0) * len(path)
        widths = {name: float(width) for name, width in path.widths(int(place)).items()}
        if place < len(path):
            step = path.steps[int(place)]
            widths[step.block] += (place - int(place)) * (step.width - widths[step.block])
        beyond = max(s - ON_PATH, 0.0) / (1 - ON_PATH)
        return widths if not beyond else {name: width * (1 - beyond) for name, width in least.items()}

    return ideal
