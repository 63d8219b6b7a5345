"""Distillation: all weights of the narrowed model at once, fitted to the dense network's outputs, without labels."""

from __future__ import annotations

from onnxgrail.core import Progress
from onnxgrail.graph.trainable import trainable
from onnxgrail.refine.job import Job, Refined
from onnxgrail.refine.mixed import mixed
from onnxgrail.refine.whole import whole

KIND = "distill"
RATE, STEPS = 1e-2, 600
ROOM = 1 << 28  # bytes of inputs


def distill(job: Job, progress: Progress) -> tuple[Refined, ...]:
    """A few hundred steps on squared error, and on the divergence of rows where an output holds logits."""
    names = sorted(trainable(job.slim).readers)
    wide = mixed(job, _times(job))
    # A sentence encoder behind `laco` found nothing with the usual steps, a ResNet less with smaller ones.
    near = wide.real is not None
    entry, arrays = whole(wide, KIND, names, progress, rate=RATE, steps=STEPS, near=near)
    job.write(arrays)
    return (entry,)


def _times(job: Job) -> int:
    """So many mixed batches for every given one that each is seen once, as far as there is room."""
    given = sum(array.nbytes for array in job.prepared.batches.first().values()) * job.given
    return min(STEPS // max(len(job.learnt), 1) - 1, ROOM // max(given, 1))
