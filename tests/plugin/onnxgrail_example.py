"""A selector, a reducer and a compensator that stand outside of onnxgrail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.core import Change, Floats, Reducer, View


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest weight that makes a unit."""

    needs_data: ClassVar[bool] = False

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Scores (u,)."""
        return np.max([np.abs(weight).max(axis=(1, 2)) for _, weight in view.of("producer")], axis=0)


class Thirds:
    """Keeps every third unit first, then the others."""

    needs_data, needs_scores = False, False

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """The units that stay."""
        order = np.argsort(np.arange(view.block.units) % 3, kind="stable")
        return Reducer(kept=np.sort(order[:kept]))


class Twice:
    """Keeps the first unit again and again, which is wrong."""

    needs_data, needs_scores = False, False

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """The units that stay."""
        return Reducer(kept=np.zeros(kept, np.int64))


class _Rescale:
    """Multiplies the remaining weights of consumers by u / k, as if the removed units had been like the others."""

    needs_data = False

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """The change of one block."""
        factor = view.block.units / len(reducer.kept)
        weights = [
            (number, view.weights[number][reducer.kept] * factor)
            for number, slot in enumerate(view.block.slots)
            if slot.role == "consumer"
        ]
        return Change(block=view.block, reducer=reducer, weights=tuple(weights))


rescale = _Rescale()


class Crooked:
    """Not what was agreed."""

    needs_data = False

    def __call__(self, *_: object) -> Floats:
        """Too few numbers."""
        return np.zeros(1)
