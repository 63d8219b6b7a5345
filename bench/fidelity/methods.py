"""The rows of the table: how units are chosen or merged, and how what is left is repaired."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PRUNE = ("l1", "l2", "wanda", "flap", "obs")
FOLDS = ("fold",)
REPAIRS: Mapping[str, Mapping[str, Any]] = {
    "none": {"compensate": "none"},
    "grail-open": {"compensate": "grail", "closed_loop": False},
    "grail-closed": {"compensate": "grail", "closed_loop": True},
    "best": {"compensate": "best"},
}
DATA_FREE = frozenset({"l1/none", "l2/none", "fold/none", "onnxsim-l2/none"})
REFINED = ("norms", "regional", "laco", "distill", "laco,distill", "ic")
"""What may follow the default repair, with gradients: too slow for all selectors and ratios."""

SIM_BASES = ("onnxsim-l2", "onnxsim-wanda")
SIM_REPAIRS = ("none", "finetune")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One row: `base` names the selector or the fold, `repair` what follows; `options` go to `onnxgrail.compress`."""

    base: str
    repair: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As the results call it."""
        return f"{self.base}/{self.repair}"

    @property
    def external(self) -> bool:
        """Whether onnxsim does the work."""
        return self.base in SIM_BASES

    def draws(self, asked: int) -> int:
        """How many calibration draws make sense: one where no data are read."""
        return 1 if self.name in DATA_FREE else asked


def every() -> list[Method]:
    """All rows in the order of the table, folds that the installed version adds included, onnxsim last."""
    from onnxgrail.algebra.reducers import REDUCERS

    folds = [*FOLDS, *sorted(name for name in REDUCERS if name.startswith("fold-"))]
    bases = [(name, {"selector": name}) for name in PRUNE] + [(name, {"reducer": name}) for name in folds]
    own = [
        Method(base=base, repair=repair, options={**choice, **options})
        for base, choice in bases
        for repair, options in REPAIRS.items()
    ]
    return own + [Method(base=base, repair=repair, options={}) for base in SIM_BASES for repair in SIM_REPAIRS]


def further() -> list[Method]:
    """Rows that take gradients, or replace layers instead of narrowing them; they run where they are named."""
    found = [Method(base="wanda", repair=kind, options={"refine": tuple(kind.split(","))}) for kind in REFINED]
    found.append(Method(base="wandapp", repair="best", options={"selector": "wandapp"}))
    return [*found, Method(base="grasp", repair="pairs", options={"method": ("grasp",)})]


def chosen(wanted: Sequence[str] | None) -> list[Method]:
    """Methods whose base or full name is in `wanted`; None takes all but the slow ones.

    Raises:
        ValueError: a name that is none of a method.
    """
    methods = every()
    if wanted is None:
        return methods
    slow = further()
    for name in wanted:
        if not any(name in (m.base, m.name) for m in [*methods, *slow]):
            raise ValueError(f"no method is called {name!r}; there are {', '.join(m.name for m in [*methods, *slow])}")
    return [m for m in methods if m.base in wanted or m.name in wanted] + [m for m in slow if m.name in wanted]


def known(methods: Iterable[Method]) -> tuple[list[Method], list[str]]:
    """Methods that the installed onnxgrail has, and the names of the others."""
    from onnxgrail.errors import MissingExtraError, UsageError
    from onnxgrail.methods import require
    from onnxgrail.methods.refine.needed import require_torch
    from onnxgrail.recipe.check import recipe_of

    found, missing = [], []
    for method in methods:
        try:
            recipe = recipe_of(method.options)
            require_torch(recipe)
            require(recipe)
        except (UsageError, MissingExtraError):
            missing.append(method.name)
        else:
            found.append(method)
    return found, missing
