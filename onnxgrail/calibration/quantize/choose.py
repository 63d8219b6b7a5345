"""Choose the layers that compute in float in a model with 8 bits: those without which it loses much less."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

GROUPS = 8  # consecutive layers are tried together, so many groups at a time; the best group is then halved
WORTH = 1.5  # share of the loss that layers must save, as a multiple of their share of the weights
BAD = 0.05  # loss from which less is enough, in proportion
BASE = 0.01  # added to the share of the weights: a layer without weights costs time
LEAST = 0.03  # least share of the loss that is worth a group
ROUNDS = 16
BROKEN = 0.1  # loss from which layers with outliers in their inputs are tried as a beginning


@dataclass(frozen=True, slots=True)
class Choice:
    """The layers that stay in float, in order, with the loss of the model before and after."""

    layers: tuple[str, ...]
    before: float
    after: float


@dataclass(frozen=True, slots=True, eq=False)
class _Trials:
    """The losses of models in which some layers compute in float, each computed once.

    Attributes:
        sizes: number of weights by layer, in the order of the model; loss: of a set of layers; known: those computed.
        least: worth from which layers may stay in float.
    """

    sizes: Mapping[str, int]
    loss: Callable[[frozenset[str]], float]
    known: dict[frozenset[str], float]
    least: float

    def of(self, layers: Collection[str]) -> float:
        """Return the loss with these layers in float; infinity if it is not a number."""
        key = frozenset(layers)
        if key not in self.known:
            found = self.loss(key)
            self.known[key] = math.inf if math.isnan(found) else found
        return self.known[key]

    def share(self, layers: Collection[str]) -> float:
        """Return the share of these layers in all weights."""
        return sum(self.sizes[name] for name in layers) / max(1, sum(self.sizes.values()))

    def worth(self, chosen: Collection[str], more: Sequence[str]) -> float:
        """Return the share of the loss that more layers in float save, per share of the weights."""
        now, then = self.of(chosen), self.of({*chosen, *more})
        saved = float(now > then) if math.isinf(now) else 1 - then / now
        return saved / (self.share(more) + BASE) if saved >= LEAST else 0.0

    def needed(self, chosen: Collection[str]) -> float:
        """Return the least worth of further layers."""
        return self.least * min(1.0, BAD / self.of(chosen))


def choose(
    sizes: Mapping[str, int],
    loss: Callable[[frozenset[str]], float],
    *,
    target: float,
    outliers: Collection[str] = (),
    worth: float = WORTH,
) -> Choice:
    """Leave groups of layers in float, the most worthwhile first, until the loss is small or no group is worth it.

    Args:
        sizes: number of weights by layer, in the order of the model.
        loss: of the model in which some layers compute in float.
        target: loss that is small enough.
        outliers: layers to begin with if the loss is large without them: where the model is broken, no single group
            mends it.
        worth: see `WORTH`.
    """
    trials = _Trials(sizes, loss, {}, worth)
    before = trials.of(())
    chosen: set[str] = set()
    if before > max(BROKEN, target) and trials.of(outliers) < before / 2:
        chosen = _taken_back(trials, set(outliers), target)
    for _ in range(ROUNDS):
        if trials.of(chosen) <= target:
            break
        group = _best(trials, chosen)
        if trials.worth(chosen, group) < trials.needed(chosen):
            break
        chosen |= set(group)
    return Choice(tuple(name for name in sizes if name in chosen), before, trials.of(chosen))


def _best(trials: _Trials, chosen: Collection[str]) -> Sequence[str]:
    """Return the consecutive layers that are worth most in float."""
    rest = [name for name in trials.sizes if name not in chosen]
    group: Sequence[str] = ()
    parts = _parts(rest, -(-len(rest) // GROUPS))
    while parts:
        found = max(parts, key=lambda part: trials.worth(chosen, part))
        if group and trials.worth(chosen, found) <= trials.worth(chosen, group):
            break
        group = found
        parts = _parts(group, len(group) // 2) if len(group) > 1 else []
    return group


def _parts(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[start : start + size] for start in range(0, len(names), max(1, size))]


def _taken_back(trials: _Trials, chosen: set[str], target: float) -> set[str]:
    """Return the layers of a first choice that matter: others, in smaller and smaller groups, get 8 bits again."""
    size = GROUPS
    while size:
        for part in _parts([name for name in trials.sizes if name in chosen], size):
            less = chosen - set(part)
            allowed = trials.of(chosen) * (1 + trials.share(part) / WORTH)
            if trials.of(less) <= max(target, allowed):
                chosen = less
        size //= 2
    return chosen
