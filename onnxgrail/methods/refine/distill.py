"""Distillation: all weights of the narrowed model at once, fitted to the dense network's outputs, without labels."""

from __future__ import annotations

from onnxgrail.graph.cost import counting
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.machine.progress import Progress
from onnxgrail.methods.refine.blended import blended
from onnxgrail.methods.refine.mixed import mixed
from onnxgrail.methods.refine.refinement import Refined, Refinement
from onnxgrail.methods.refine.whole import whole

KIND = "distill"
RATE, STEPS = 1e-2, 600
ROOM = 1 << 28  # bytes of inputs
MORE = 4  # times as many steps at most, where there are blends to learn from
LATE = 0.8  # of such a descent is passed before weights are chosen
WORK = 10**12  # multiply-accumulates that the original network may take for those, one batch a step


def distill(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    """Hundreds or thousands of steps on squared error, and on the divergence of rows where an output holds logits."""
    names = sorted(trainable(job.slim).readers)
    long = _long(job)
    wide = blended(job, _times(job, long))
    late = 0.0
    if wide.real is not None:
        # Closed forms have seen what is held out here, so the beginning looks better than it is.  A ViT kept its second
        # epoch, 0.097 for 0.106, and 82 % right; the end of a descent in smaller steps was at 0.073, and 92 %.
        steps, near, late = long, False, LATE
    else:
        wide = mixed(job, _times(job, STEPS))
        # A sentence encoder behind `laco` found nothing with the usual steps, a ResNet less with smaller ones.
        steps, near = STEPS, wide.real is not None
    entry, arrays = whole(wide, KIND, names, progress, rate=RATE, steps=steps, near=near, late=late)
    job.write(arrays)
    return (entry,)


def _long(job: Refinement) -> int:
    """More steps, as long as they are cheap; by the size of the model and not by the clock, so that a run repeats."""
    prepared = job.prepared
    sample = counting.macs(prepared.model, prepared.survey) / prepared.samples
    batch = max(sample * prepared.batches.samples / len(prepared.batches), 1.0)
    return min(max(STEPS, int(WORK / batch)), MORE * STEPS)


def _times(job: Refinement, steps: int) -> int:
    """So many made batches for every given one that each is seen once, as far as there is room."""
    given = sum(array.nbytes for array in job.prepared.batches.first().values()) * job.given
    return min(steps // max(len(job.learnt), 1) - 1, ROOM // max(given, 1))
