"""Fits only scales and biases of normalizations to the dense network's outputs, without labels."""

from __future__ import annotations

import dataclasses
import time

from onnxgrail.core import Outcome
from onnxgrail.graph.fittable.scales import places
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.machine.progress import Progress
from onnxgrail.methods.refine.refinement import Refined, Refinement
from onnxgrail.methods.refine.whole import Descent, entry_of, whole

KIND = "norms"
RATE, STEPS = 1e-2, 600
NONE = "no normalization has a scale or bias of its own"


def norms(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    """Fit scales and biases of normalizations, which all channels pass through, in a few hundred steps.

    References:
        Cut Less, Fold More: there normalizations are tuned with labels, here to the dense outputs.
    """
    started = time.perf_counter()
    names = _weights(job)
    if not names:
        return (entry_of(KIND, started, Outcome(status="skipped", reason=NONE)),)
    entry, arrays = whole(job, KIND, names, progress, Descent(RATE, STEPS))
    job.write(arrays)
    return (dataclasses.replace(entry, seconds=time.perf_counter() - started),)


def _weights(job: Refinement) -> list[str]:
    """Return the initializers that are scales or biases of normalizations, without those applied to convolutions."""
    survey = Survey(blocks=(), refusals=(), facts=job.own(), marks={}, operands={}, ids=1)
    convolutions = {key(node) for node in job.slim.graph if node.op_type == "Conv"}
    found = [p for p in places(job.slim, survey) if p.node not in convolutions]
    parts = [part.value for place in found for part in (place.scale, place.bias) if part is not None]
    held = job.slim.graph.initializers
    return sorted({n for n in parts if n in held})
