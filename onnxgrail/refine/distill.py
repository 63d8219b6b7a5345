"""Distillation: all weights of the narrowed model at once, fitted to the dense network's outputs, without labels."""

from __future__ import annotations

from onnxgrail.core import Progress
from onnxgrail.graph.trainable import trainable
from onnxgrail.refine.job import Job, Refined
from onnxgrail.refine.whole import whole

KIND = "distill"
RATE, STEPS = 1e-2, 600


def distill(job: Job, progress: Progress) -> tuple[Refined, ...]:
    """A few hundred steps on squared error, and on the divergence of rows where an output holds logits."""
    names = sorted(trainable(job.slim).readers)
    entry, arrays = whole(job, KIND, names, progress, rate=RATE, steps=STEPS)
    job.write(arrays)
    return (entry,)
