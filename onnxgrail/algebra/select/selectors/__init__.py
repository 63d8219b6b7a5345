"""Selectors by name. To add a selector: one file with a frozen dataclass, and one line in `SELECTORS`."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np

from onnxgrail.algebra.select.selectors.flap import Flap
from onnxgrail.algebra.select.selectors.gram import Gram
from onnxgrail.algebra.select.selectors.l1 import L1
from onnxgrail.algebra.select.selectors.l2 import L2
from onnxgrail.algebra.select.selectors.obs import Obs
from onnxgrail.algebra.select.selectors.random import Random
from onnxgrail.algebra.select.selectors.slimgpt import SlimGpt
from onnxgrail.algebra.select.selectors.wanda import Wanda
from onnxgrail.algebra.select.selectors.wandapp import Wandapp
from onnxgrail.core import Floats, View


class Scorer(Protocol):
    """A `core.Selector` with `needs_data`, True if it reads `view.stats`.

    A selector with `needs_gram = False` reads only squares and totals, so that products need not be measured for it.
    """

    needs_data: ClassVar[bool]

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score a block's units (u,); units with high scores stay."""
        ...


SELECTORS: dict[str, Scorer] = {
    "l1": L1(),
    "l2": L2(),
    "wanda": Wanda(),
    "wandapp": Wandapp(),
    "flap": Flap(),
    "gram": Gram(),
    "obs": Obs(),
    "slimgpt": SlimGpt(),
    "random": Random(),
}
GRADIENTS = frozenset({"wandapp"})  # selectors that read `view.gradient`, which needs torch


def needs_gram(selector: Scorer) -> bool:
    """Return True if a selector reads products of different channels (the default for selectors that need data)."""
    return bool(getattr(selector, "needs_gram", selector.needs_data))
