"""Distillation: all weights of the narrowed model at once, fitted to the dense network's outputs, without labels."""

from __future__ import annotations

import time

from onnxgrail.core import Outcome, Progress
from onnxgrail.errors import ModelError, UnsupportedOpError
from onnxgrail.graph.trainable import trainable
from onnxgrail.refine.job import Job, Refined, logits

KIND = "distill"
RATE, STEPS = 1e-2, 600
KEPT = 1 << 30  # bytes of dense outputs that are kept; beyond that they are computed again


def distill(job: Job, progress: Progress) -> tuple[Refined, ...]:
    """A few hundred steps on squared error, and on the divergence of rows where an output holds logits."""
    from onnxgrail.torchgraph.fit import Batch, Settings, fit

    started = time.perf_counter()
    names, outputs = sorted(trainable(job.slim).readers), job.outputs()

    def entry(outcome: Outcome, before: float | None = None, after: float | None = None, epochs: int = 0) -> Refined:
        spent = time.perf_counter() - started
        return Refined(
            block="model", kind=KIND, before=before, after=after, epochs=epochs, seconds=spent, outcome=outcome
        )

    slim = job.walk(job.slim)
    if not outputs or not names:
        return (entry(Outcome(status="skipped", reason="no weights that could move, or no output to compare")),)
    first = slim.source(outputs)(job.learnt[0])
    dense = job.walk(job.prepared.model).source(outputs)
    spread = job.learnt[:: -(-len(job.learnt) // STEPS)]
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
        rate=RATE,
        epochs=1,
        steps=STEPS,
        seconds=job.left(),
        seed=job.recipe.seed,
        divergence=rows,
        probable=probable,
    )
    total, done = -(-STEPS // len(spread)), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(KIND, done, total)

    learnt, held = ([lambda k=k: batch(k) for k in some] for some in (spread, job.held))
    try:
        found = fit(
            slim.piece(outputs), names, learnt, held, settings, expected={n: first[n] for n in outputs}, tick=tick
        )
    except UnsupportedOpError as error:
        return (entry(Outcome(status="skipped", reason=f"no gradient through {error.op}")),)
    except ModelError as error:
        return (entry(Outcome(status="skipped", reason=error.args[0])),)
    progress(KIND, total, total)
    if not found.arrays:
        outcome = Outcome(status="plain", reason="no better weights on held-out samples")
        return (entry(outcome, found.before, found.before, found.epochs),)
    job.write(found.arrays)
    return (entry(Outcome(), found.before, found.after, found.epochs),)
