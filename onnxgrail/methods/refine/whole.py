"""Fits weights of the whole narrowed model at once to the dense network's outputs, without labels."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnxgrail.core import Array, Outcome
from onnxgrail.errors import ModelError, UnsupportedOpError
from onnxgrail.machine.progress import Progress, ticking
from onnxgrail.methods.refine.refinement import FIT, Refined, Refinement, logits

KEPT = 1 << 30  # most bytes of dense outputs to keep in memory; more are computed again
Found = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Descent:
    """The settings of a fit.

    Attributes:
        rate: learning rate relative to a weight's size.
        steps: number of steps.
        sizes, near, late: as in `Settings`.
    """

    rate: float
    steps: int
    sizes: Mapping[str, float] = field(default_factory=dict)
    near: bool = False
    late: float = 0.0


def entry_of(
    kind: str,
    started: float,
    outcome: Outcome,
    *,
    block: str = "model",
    errors: tuple[float, float] | None = None,
    epochs: int = 0,
) -> Refined:
    """Return the report entry of a fit of the whole model, or of a block, which began at `started`."""
    before, after = errors or (None, None)
    spent = time.perf_counter() - started
    return Refined(block=block, kind=kind, before=before, after=after, epochs=epochs, seconds=spent, outcome=outcome)


def whole(
    job: Refinement, kind: str, names: Sequence[str], progress: Progress, descent: Descent
) -> tuple[Refined, Found]:
    """Fit weights by squared error, plus the divergence of rows if an output holds logits.

    Args:
        job: the two models; the narrowed one is not changed.
        kind: of refinement, for the report.
        names: weights to fit.
        progress: called with the progress.
        descent: settings of the fit.

    Returns:
        The entry, and new weights if they are better on held-out batches.
    """
    return job.steps.once(f"refine {kind}", lambda: _whole(job, kind, names, progress, descent), FIT)


def _whole(job: Refinement, kind: str, names: Sequence[str], progress: Progress, way: Descent) -> tuple[Refined, Found]:
    from onnxgrail.torchgraph.fit import Batch, Samples, Settings, fit

    started = time.perf_counter()
    outputs = job.outputs()
    slim = job.walk(job.slim)
    if not outputs or not names:
        outcome = Outcome(status="skipped", reason="no weights that could move, or no output to compare")
        return entry_of(kind, started, outcome), {}
    first = slim.source(outputs)(job.learnt[0])
    dense = job.walk(job.prepared.model).source(outputs)
    spread = job.learnt[:: -(-len(job.learnt) // way.steps)]
    each = min(job.each, len(spread))
    size = sum(first[n].nbytes for n in outputs) * (len(spread) + len(job.held))
    kept: dict[int, Batch] = {}

    def batch(number: int) -> Batch:
        if number in kept:
            return kept[number]
        goals = {n: job.goal(n, a) for n, a in dense(number).items() if n in outputs}
        made = Batch(inputs=slim.cache[number], goals=goals, mask=job.masks[number])
        if size <= KEPT:
            kept[number] = made
        return made

    rows, probable = logits(outputs, {n: job.goal(n, a) for n, a in dense(job.learnt[0]).items()})
    settings = Settings(
        rate=way.rate,
        near=way.near,
        late=way.late,
        epochs=1,
        steps=way.steps,
        each=each,
        seconds=job.left(),
        seed=job.recipe.seed,
        divergence=rows,
        probable=probable,
        sizes=way.sizes,
    )
    total = -(-way.steps // each)
    learnt, held = ([lambda k=k: batch(k) for k in some] for some in (spread, job.held))
    expected = {n: first[n] for n in outputs}
    tick = ticking(progress, kind, total)
    try:
        found = fit(slim.piece(outputs), names, Samples(learnt, held), settings, expected=expected, tick=tick)
    except UnsupportedOpError as error:
        return entry_of(kind, started, Outcome(status="skipped", reason=f"no gradient through {error.op}")), {}
    except ModelError as error:
        return entry_of(kind, started, Outcome(status="skipped", reason=error.args[0])), {}
    progress(kind, total, total)
    outcome = Outcome() if found.arrays else Outcome(status="plain", reason="no better weights on held-out samples")
    errors = found.before, found.after if found.arrays else found.before
    return entry_of(kind, started, outcome, errors=errors, epochs=found.epochs), found.arrays
