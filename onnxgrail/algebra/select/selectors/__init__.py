"""Selectors by name. To add a selector: one file with a frozen dataclass, and one line in `registry.SELECTORS`."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, ClassVar, Protocol

import numpy as np

from onnxgrail import registry
from onnxgrail.core import Block, Floats, View


class Scorer(Protocol):
    """A `core.Selector` with `needs_data`, True if it reads `view.stats`.

    A selector with `needs_gram = False` reads only squares and totals, so that products need not be measured for it.
    One with `consumers_only = True` reads weights of consumers only, so that several processes can score neighboring
    blocks at the same time; so do such reducers and compensators.
    """

    needs_data: ClassVar[bool]

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score a block's units (u,); units with high scores stay."""
        ...


SELECTORS: MutableMapping[str, Any] = registry.SELECTORS
GRADIENTS = frozenset({"wandapp"})  # selectors that read `view.gradient`, which needs torch
AUTO = "auto"  # names a selector for each block


def needs_gram(selector: Scorer) -> bool:
    """Return True if a selector reads products of different channels (the default for selectors that need data)."""
    return bool(getattr(selector, "needs_gram", selector.needs_data))


def needs_gram_of(name: str, block: Block) -> bool:
    """Return True if a selector reads products of different channels of this block."""
    selector = SELECTORS[name]
    return bool(selector.eliminates(block)) if name == AUTO else needs_gram(selector)


def taken(name: str, view: View) -> str:
    """Return the name of the selector that scores a block: `name`, unless that is `auto`."""
    return str(SELECTORS[name].taken(view)) if name == AUTO else name
