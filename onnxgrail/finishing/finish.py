"""Finish what was decided; if the finished model loses more than its candidate did, search once more."""

from __future__ import annotations

from dataclasses import replace

from onnxgrail import methods
from onnxgrail.allocation.found import Judged
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.finishing.ship import ship
from onnxgrail.finishing.shipped import Shipped
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.journal import Searched
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.methods import Worked
from onnxgrail.narrowing.decide import Decision, decided
from onnxgrail.search.candidates import JUDGED, judging

TIMES = 3  # most searches after the first one; each judges a few candidates
AGAIN = "fitted to all data, what the search had chosen would lose too much, so it went on"


def finished(
    prepared: Prepared, made: tuple[Prepared, Decision], job: Job, *, latency: bool
) -> tuple[tuple[Prepared, Decision], Worked, Shipped]:
    """Narrow and finish the model, in the first process.

    A search judges fits to parts of the data. The fit to all data has other numbers, and a few samples may lose much
    once these are rounded. Then that loss counts for the candidate, and the search goes on.

    Args:
        prepared: the model and its data.
        made: the model that the decision is about, and the decision.
        job: the run.
        latency: see `ship`.

    Returns:
        The model and the decision that was finished, the results of further methods, and the finished model.
    """
    done = _finished(made, job, latency=latency)
    for _ in range(TIMES):
        (_, decision), _, shipped = done
        search = decision.allocation.found
        if search is None or not shipped.exceeds(search):
            break
        job = _corrected(job, search.key, Judged(**shipped.keys["quantization"]["loss"]))
        source, decision = decided(prepared, job)
        allocation = decision.allocation
        if allocation.found is None or allocation.found.chosen is None:
            break
        note = "; ".join(filter(None, (allocation.note, AGAIN)))
        made = source, replace(decision, allocation=replace(allocation, note=note))
        done = _finished(made, job, latency=latency)
    return done


def _finished(
    made: tuple[Prepared, Decision], job: Job, *, latency: bool
) -> tuple[tuple[Prepared, Decision], Worked, Shipped]:
    source, decision = made
    with job.clock.stage("narrow"):
        slim = narrowed(source, decision.ledger)
    worked = methods.apply(source, decision, slim, job)
    return made, worked, ship(source, decision, slim, job, latency=latency)


def _corrected(job: Job, key: str, loss: Judged) -> Job:
    """Return the job of a run that searches once more, in this process alone, and knows another loss of a candidate.

    Args:
        job: the run that has searched.
        key: of the candidate's widths.
        loss: its loss.
    """
    journal = Searched(job.steps.journal)
    journal.put(judging(key), JUDGED.encode((loss, False)))
    return Job(recipe=job.recipe, steps=Steps(journal=journal), clock=job.clock)
