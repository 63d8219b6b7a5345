"""Layer-wise compensation: block by block to the dense outputs, from the inputs that the narrowed network has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Outcome, Progress
from onnxgrail.errors import ModelError, UnsupportedOpError
from onnxgrail.graph.chunks import Chunk, chunks
from onnxgrail.graph.facts import key
from onnxgrail.graph.live import lives
from onnxgrail.graph.naming import common_scope
from onnxgrail.graph.trainable import Trainable, trainable
from onnxgrail.refine.job import Job, Refined
from onnxgrail.refine.walk import Walk

KIND = "laco"
NEAR = 1e-10  # squared error, as a share, below which a block is what it was
RATE, EPOCHS, STEPS = 1e-2, 10, 400  # at least so many epochs and steps
TAKEN_BACK = "the model's outputs came no closer, so all of it was taken back"


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A chunk of the dense model, where it begins and ends in the narrowed one, and the tensors to be matched.

    Goals have the names of the dense model.
    """

    name: str
    chunk: Chunk
    begin: int
    end: int
    goals: tuple[str, ...]


def laco(job: Job, progress: Progress) -> tuple[Refined, ...]:
    """Fit every block of the narrowed model in order, each behind the ones already fitted.

    Returns:
        One entry per block, and one for the outputs of the whole model.

    References:
        Algorithm 1 of LaCo: targets from the dense stream, inputs from the compressed one.
    """
    found = trainable(job.slim)
    todo = _blocks(job)
    report: list[Refined] = []
    old: dict[str, Array] = {}
    started = time.perf_counter()
    before = job.apart(job.held)
    dense, slim = job.walk(job.prepared.model), job.walk(job.slim)
    weights = [max(len(found.within(b.begin, b.end)), 1) for b in todo]
    total = len(todo) * EPOCHS
    for number, block in enumerate(todo):
        left = job.left()
        seconds = None if left is None else left * weights[number] / sum(weights[number:])
        targets = dense.advance(block.chunk.end, block.goals)
        entry, changed = _fitted(job, block, found, slim, targets, seconds, _ticks(progress, number, total))
        old |= changed
        report.append(entry)
        progress(KIND, (number + 1) * EPOCHS, total)
        if number + 1 < len(todo):
            slim.advance(block.end)
    after, outcome = (job.apart(job.held), Outcome()) if old else (before, Outcome(status="plain", reason="no change"))
    if not after <= before:
        job.write(old)
        after, outcome = before, Outcome(status="plain", reason=TAKEN_BACK)
    spent = time.perf_counter() - started
    whole = Refined(block="model", kind=KIND, before=before, after=after, epochs=0, seconds=spent, outcome=outcome)
    return (*report, whole)


def _ticks(progress: Progress, number: int, total: int) -> Callable[[], None]:
    epochs = iter(range(1, EPOCHS))

    def tick() -> None:
        progress(KIND, number * EPOCHS + next(epochs, EPOCHS - 1), total)

    return tick


def _blocks(job: Job) -> list[_Block]:
    """Chunks of the dense model that the narrowed one has, too."""
    model, facts = job.prepared.model, job.prepared.survey.facts
    nodes = list(model.graph)
    found, alive = trainable(model), lives(model, facts, [1] * len(nodes))
    place = {v.name: number + 1 for number, node in enumerate(job.slim.graph) for v in node.outputs if v.name}
    named = {v.name for v in job.slim.graph.inputs} | place.keys()
    blocks: list[_Block] = []
    begin = start = 0
    every = chunks(model, found, alive)
    for chunk in every:
        final = chunk is every[-1]
        there = chunk.last in job.alias or (chunk.last in place and all(n in named for n in alive.at(chunk.end)))
        if not final and not there:
            continue  # goes on into the next one
        whole = Chunk(start, chunk.end, chunk.last, chunk.heavy)
        end = len(list(job.slim.graph)) if final else place[job.here(chunk.last)]
        made = {v.name or "" for node in nodes[start : chunk.end] for v in node.outputs}
        names = job.outputs() if final else [n for n in alive.at(chunk.end) if n in found.carriers]
        goals = tuple(n for n in names if n in made and job.here(n) in place and facts.dtypes[n].kind in "fV")
        blocks.append(_Block(_name(nodes[start : chunk.end], found), whole, begin, end, goals))
        begin, start = end, chunk.end
    return blocks


def _name(nodes: Sequence[ir.Node], found: Trainable) -> str:
    """The module that holds the products of a chunk."""
    heavy = [n for n in nodes if any(v is not None and v.name in found.matrices for v in n.inputs)]
    return common_scope(heavy or nodes) or key(nodes[-1])


def _fitted(
    job: Job,
    block: _Block,
    found: Trainable,
    slim: Walk,
    targets: Sequence[Mapping[str, Array]],
    seconds: float | None,
    tick: Callable[[], None],
) -> tuple[Refined, dict[str, Array]]:
    """One block: its entry, and the numbers its weights had where they changed."""
    from onnxgrail.torchgraph.fit import Batch, Settings, fit

    started = time.perf_counter()

    def entry(outcome: Outcome, before: float | None = None, after: float | None = None, epochs: int = 0) -> Refined:
        spent = time.perf_counter() - started
        return Refined(
            block=block.name, kind=KIND, before=before, after=after, epochs=epochs, seconds=spent, outcome=outcome
        )

    names = found.within(block.begin, block.end)
    made = slim.source([job.here(n) for n in block.goals])(job.learnt[0]) if block.goals and names else {}
    first = {n: made[job.here(n)] for n in block.goals if made}
    wanted = {n: job.goal(n, targets[job.learnt[0]][n]) for n in first}
    goals = [n for n in first if first[n].shape == wanted[n].shape]
    if not goals:
        return entry(Outcome(status="skipped", reason="no weights of its own, or no output to compare")), {}
    if all(_near(first[n], wanted[n]) for n in goals):
        return entry(Outcome(status="skipped", reason="as in the original network")), {}

    def batch(number: int) -> Batch:
        return Batch(
            inputs=slim.cache[number],
            goals={job.here(n): job.goal(n, targets[number][n]) for n in goals},
            mask=job.masks[number],
        )

    settings = Settings(rate=RATE, epochs=EPOCHS, steps=STEPS, seconds=seconds, seed=job.recipe.seed)
    learnt, held = ([lambda k=k: batch(k) for k in some] for some in (job.learnt, job.held))
    expected = {job.here(n): first[n] for n in goals}
    try:
        done = fit(slim.piece(list(expected)), names, learnt, held, settings, expected=expected, tick=tick)
    except UnsupportedOpError as error:
        return entry(Outcome(status="skipped", reason=f"no gradient through {error.op}")), {}
    except ModelError as error:
        return entry(Outcome(status="skipped", reason=error.args[0])), {}
    if not done.arrays:
        outcome = Outcome(status="plain", reason="no better weights on held-out samples")
        return entry(outcome, done.before, done.before, done.epochs), {}
    return entry(Outcome(), done.before, done.after, done.epochs), job.write(done.arrays)


def _near(a: Array, b: Array) -> bool:
    wide, goal = (np.asarray(x, dtype=np.float64) for x in (a, b))
    return bool(np.square(wide - goal).sum() <= NEAR * np.square(goal).sum())
