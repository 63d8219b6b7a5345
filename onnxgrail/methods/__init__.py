"""`--method`: what is done to a model.  `grail` narrows blocks, which is `decision.decide`; the others work on what
narrowing leaves, one entry each in `METHODS`, in the order of that table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.core import Applied, Recipe
from onnxgrail.errors import MissingExtraError
from onnxgrail.graph.survey import Ledger
from onnxgrail.journal import NO_JOURNAL, Journal
from onnxgrail.preparation import Prepared
from onnxgrail.progress import Progress

NARROWING = "grail"

Run = Callable[[Prepared, Recipe, Ledger, ir.Model, Progress, Journal], Applied]
"""Changes the graph that narrowing left, in place; the prepared model and the ledger say what it was.  The journal has
what a killed run has finished.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One entry.

    Attributes:
        run: does it.
        needs_torch: whether it takes gradients with this recipe.
        last: it comes behind `--refine`, which then does not see it.
    """

    run: Run
    needs_torch: Callable[[Recipe], bool]
    last: bool = False


def _grasp() -> Method:
    from onnxgrail.grasp.method import needs_torch, replace_layers  # slow to import

    return Method(run=replace_layers, needs_torch=needs_torch)


METHODS: dict[str, Callable[[], Method]] = {"grasp": _grasp}


def narrows(recipe: Recipe) -> bool:
    """Whether blocks are narrowed at all."""
    return NARROWING in recipe.method


def beside(recipe: Recipe) -> bool:
    """Whether something else than narrowing makes the model smaller."""
    return any(name in METHODS for name in recipe.method)


def require(recipe: Recipe) -> None:
    """Whether what was asked for can run at all.

    Raises:
        MissingExtraError: it takes gradients, and torch is not installed.
    """
    for name, method in _chosen(recipe).items():
        if method.needs_torch(recipe) and importlib.util.find_spec("torch") is None:
            raise MissingExtraError(
                f"--method {name} needs torch for this, which is not installed",
                hint="Run: pip install 'onnxgrail[torch]'",
            )


def further(
    prepared: Prepared,
    recipe: Recipe,
    ledger: Ledger,
    slim: ir.Model,
    progress: Progress,
    journal: Journal = NO_JOURNAL,
    *,
    last: bool,
) -> dict[str, Applied]:
    """Run the methods that come in front of `--refine`, or those that come behind it, by name."""
    chosen = {n: m for n, m in _chosen(recipe).items() if m.last == last}
    return {n: m.run(prepared, recipe, ledger, slim, progress, journal) for n, m in chosen.items()}


def _chosen(recipe: Recipe) -> dict[str, Method]:
    return {name: load() for name, load in METHODS.items() if name in recipe.method}
