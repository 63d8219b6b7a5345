"""The methods of `--method`: `grail` narrows blocks (`decide`), and entries of `METHODS` change the narrowed graph.

Methods beside `grail` run in the order of `METHODS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Applied, Recipe
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.extras import require as require_extra
from onnxgrail.machine.job import Job
from onnxgrail.methods.refine.needed import require_torch
from onnxgrail.narrowing.decide import Decision

if TYPE_CHECKING:
    from onnxgrail.methods.refine.refinement import Refined


Run = Callable[[Prepared, Job, Ledger, ir.Model], Applied]
"""Changes the narrowed graph in place; the prepared model and the ledger describe the original. The steps of the job
cache what an interrupted run has finished.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One entry of `METHODS`.

    Attributes:
        run: applies the method.
        needs_torch: returns True if the method needs gradients with this recipe.
        last: True if the method runs after `--refine`, which then does not see its changes.
    """

    run: Run
    needs_torch: Callable[[Recipe], bool]
    last: bool = False


def _grasp() -> Method:
    from onnxgrail.methods.grasp.method import replace_layers  # slow to import
    from onnxgrail.methods.grasp.steps import needs_torch

    return Method(run=replace_layers, needs_torch=needs_torch)


METHODS: dict[str, Callable[[], Method]] = {"grasp": _grasp}


def beside(recipe: Recipe) -> bool:
    """Return True if a method other than narrowing makes the model smaller."""
    return any(name in METHODS for name in recipe.method)


def require(recipe: Recipe) -> None:
    """Check that the chosen methods, refinements and selector can run.

    Raises:
        MissingExtraError: one of them needs gradients, and torch is not installed.
    """
    require_torch(recipe)
    for name, method in _chosen(recipe).items():
        if method.needs_torch(recipe):
            require_extra("torch", "torch", f"--method {name} needs torch for this")


@dataclass(frozen=True, slots=True)
class Worked:
    """The results of refinements and of methods beside narrowing.

    Attributes:
        refined: one entry per fit.
        applied: results by method.
    """

    refined: tuple[Refined, ...] = ()
    applied: Mapping[str, Applied] = field(default_factory=dict)


def apply(prepared: Prepared, decision: Decision, slim: ir.Model, job: Job) -> Worked:
    """Run methods beside narrowing, and refinements between them, on the narrowed graph, in place.

    To be called in the first process only.
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
    """Run the methods that come before `--refine`, or those that come after it; return results by name."""
    chosen = {n: m for n, m in _chosen(job.recipe).items() if m.last == last}
    return {n: m.run(prepared, job, ledger, slim) for n, m in chosen.items()}


def _chosen(recipe: Recipe) -> dict[str, Method]:
    return {name: load() for name, load in METHODS.items() if name in recipe.method}
