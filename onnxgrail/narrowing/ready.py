"""Makes blocks ready to be decided: the proof that they narrow exactly, and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxgrail.algebra.select.selectors import GRADIENTS
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.proof import proved
from onnxgrail.core import Block, Floats, Refusal
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec, Record

ARRAYS: Codec[Mapping[str, Floats]] = Codec(lambda arrays: Record(arrays=arrays), lambda record: record.arrays)


def ready(
    prepared: Prepared, job: Job, chosen: Sequence[Block], widths: Mapping[str, int]
) -> tuple[Prepared, tuple[Block, ...], tuple[Refusal, ...]]:
    """Prove that blocks narrow exactly, and compute the gradients that the selector reads.

    Args:
        prepared: the model and its data.
        job: the run.
        chosen: the blocks that the recipe selects.
        widths: block name to units at which the blocks are proved; those with all units are not.

    Returns:
        The model with gradients, the blocks that passed the proof, and the refusals of the others.
    """
    blocks = tuple(b for b in chosen if widths[b.name] < b.units)
    refusals: tuple[Refusal, ...] = ()
    with job.clock.stage("prove"):
        if blocks:
            blocks, refusals = proved(prepared, job, blocks, widths)
    if job.recipe.selector in GRADIENTS and blocks:
        with job.clock.stage("gradients"):
            prepared = _with_gradients(prepared, blocks, job)
    return prepared, blocks, refusals


def _with_gradients(prepared: Prepared, blocks: Sequence[Block], job: Job) -> Prepared:
    """Return the prepared model with the gradients that the selector reads, computed by the first process."""
    from onnxgrail.narrowing.gradients import regional_gradients  # slow to import

    gradients = job.steps.once(
        "gradients", lambda: regional_gradients(prepared, blocks, job.recipe, job.progress), ARRAYS
    )
    return replace(prepared, gradients=gradients)
