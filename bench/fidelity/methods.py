"""The rows of the table: the choice or merging of units, and the compensation."""

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
EFFORTS = ("fast", "normal", "max")
REFINED = ("norms", "laco", "distill", "laco,distill", "ic")
"""Gradient fits after the default compensation, too slow to run for all selectors and ratios."""

SIM_BASES = ("onnxsim-l2", "onnxsim-wanda")
SIM_REPAIRS = ("none", "finetune")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A row: `base` is the selector or fold, `repair` the compensation; `options` go to `onnxgrail.compress`."""

    base: str
    repair: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name in the results."""
        return f"{self.base}/{self.repair}"

    @property
    def external(self) -> bool:
        """Return True if onnxsim does the pruning."""
        return self.base in SIM_BASES

    def draws(self, asked: int) -> int:
        """Return the number of calibration splits: 1 for a method without data."""
        return 1 if self.name in DATA_FREE else asked


def every() -> list[Method]:
    """Return all rows in the order of the table, including all folds of the installed version, onnxsim last."""
    from onnxgrail.algebra.reducers import REDUCERS

    folds = [*FOLDS, *sorted(name for name in REDUCERS if name.startswith("fold-"))]
    bases = [(name, {"selector": name}) for name in PRUNE] + [(name, {"reducer": name}) for name in folds]
    own = [
        Method(base=base, repair=repair, options={**choice, **options})
        for base, choice in bases
        for repair, options in REPAIRS.items()
    ]
    return own + [Method(base=base, repair=repair, options={}) for base in SIM_BASES for repair in SIM_REPAIRS]


def efforts() -> list[Method]:
    """Return the rows of `--effort`; they run only if named."""
    return [Method(base="effort", repair=name, options={"effort": name}) for name in EFFORTS]


def further() -> list[Method]:
    """Return the rows with gradients, or with layers replaced instead of narrowed; they run only if named."""
    found = [
        Method(base="wanda", repair=kind, options={"selector": "wanda", "refine": tuple(kind.split(","))})
        for kind in REFINED
    ]
    found.append(Method(base="wandapp", repair="best", options={"selector": "wandapp"}))
    return [*found, Method(base="grasp", repair="pairs", options={"method": ("grasp",)})]


def named() -> list[Method]:
    """Return all rows that run only if named."""
    return [*efforts(), *further()]


def chosen(wanted: Sequence[str] | None) -> list[Method]:
    """Return the methods whose base or full name is in `wanted`; None takes all but the slow ones.

    Raises:
        ValueError: there is no method of a name.
    """
    methods = every()
    if wanted is None:
        return methods
    slow = named()
    fast = {m.base for m in methods}
    for name in wanted:
        if not any(name in (m.base, m.name) for m in [*methods, *slow]):
            raise ValueError(f"no method is called {name!r}; there are {', '.join(m.name for m in [*methods, *slow])}")
    groups = [name for name in wanted if name not in fast]
    return [m for m in methods if m.base in wanted or m.name in wanted] + [
        m for m in slow if m.name in wanted or m.base in groups
    ]


def known(methods: Iterable[Method]) -> tuple[list[Method], list[str]]:
    """Return the methods that the installed onnxgrail has, and the names of the others."""
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
