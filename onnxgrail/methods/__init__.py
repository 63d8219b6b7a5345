"""`--method`: what is done to a model.  `grail` narrows blocks, which is `decision.decide`; the others work on what
narrowing leaves, one entry each in `METHODS`, in the order of that table.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxgrail.calibration.prepare import Prepared
from onnxgrail.core import Applied, Recipe
from onnxgrail.errors import MissingExtraError
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.decide import Decision

if TYPE_CHECKING:
    from onnxgrail.methods.refine.refinement import Refined

NARROWING = "grail"

Run = Callable[[Prepared, Job, Ledger, ir.Model], Applied]
"""Changes the graph that narrowing left, in place; the prepared model and the ledger say what it was.  The steps of the
job hold what a killed run has finished.
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
    from onnxgrail.methods.grasp.method import needs_torch, replace_layers  # slow to import

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


@dataclass(frozen=True, slots=True)
class Worked:
    """What refinements and methods beside narrowing did.

    Attributes:
        refined: one entry per fit.
        applied: by method.
    """

    refined: tuple[Refined, ...] = ()
    applied: Mapping[str, Applied] = field(default_factory=dict)


def apply(prepared: Prepared, decision: Decision, slim: ir.Model, job: Job) -> Worked:
    """Work on the narrowed graph, in place: methods beside narrowing, and refinements between them.

    Only the first process does; the others have nothing to do meanwhile.
    """
    prepared, job = prepared.as_written(), dataclasses.replace(job, steps=job.steps.alone())
    refined: tuple[Refined, ...] = ()
    with job.clock.stage("methods"):
        applied = _further(prepared, job, decision.ledger, slim, last=False)
    if job.recipe.refine:
        from onnxgrail.methods.refine.steps import refine  # slow to import

        with job.clock.stage("refine"):
            refined = refine(prepared, job, decision.ledger, decision.changes, slim)
    with job.clock.stage("methods"):
        applied |= _further(prepared, job, decision.ledger, slim, last=True)
    return Worked(refined, applied)


def _further(prepared: Prepared, job: Job, ledger: Ledger, slim: ir.Model, *, last: bool) -> dict[str, Applied]:
    """Run the methods that come in front of `--refine`, or those that come behind it, by name."""
    chosen = {n: m for n, m in _chosen(job.recipe).items() if m.last == last}
    return {n: m.run(prepared, job, ledger, slim) for n, m in chosen.items()}


def _chosen(recipe: Recipe) -> dict[str, Method]:
    return {name: load() for name, load in METHODS.items() if name in recipe.method}
