"""Finish what was decided; if the finished model loses more than its candidate did, what another candidate decides."""

from __future__ import annotations

from onnxgrail import methods
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.finishing.ship import ship
from onnxgrail.finishing.shipped import Shipped
from onnxgrail.machine.job import Job
from onnxgrail.methods import Worked
from onnxgrail.narrowing.decide import Decision, next_decided


def finished(
    prepared: Prepared, made: tuple[Prepared, Decision], job: Job, *, latency: bool, weights: str
) -> tuple[tuple[Prepared, Decision], Worked, Shipped]:
    """Narrow and finish the model, in the first process.

    Fits to all data have other numbers than those to parts of them, which the search judges, and few samples may lose
    much by rounding these.

    Args:
        prepared: the model and its data.
        made: the model that the decision is about, and the decision.
        job: the run.
        latency: see `ship`.
        weights: see `ship`.

    Returns:
        The model and the decision that was finished, the results of further methods, and the finished model.
    """
    while True:
        source, decision = made
        with job.clock.stage("narrow"):
            slim = narrowed(source, decision.ledger)
        worked = methods.apply(source, decision, slim, job)
        shipped = ship(source, decision, slim, job, latency=latency, weights=weights)
        if not (shipped.exceeds(decision.allocation.found) and decision.allocation.others):
            return made, worked, shipped
        made = next_decided(prepared, decision, job)
        job = Job(recipe=job.recipe, clock=job.clock)  # stored steps are those of the candidate before
