"""Layer-wise compensation: fits block by block to the dense outputs, from the narrowed network's inputs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Array, Outcome
from onnxgrail.errors import ModelError, UnsupportedOpError
from onnxgrail.graph.cuts.chunks import Chunk, chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import Trainable, trainable
from onnxgrail.graph.notes import common_scope
from onnxgrail.graph.trace.facts import key
from onnxgrail.machine.progress import Progress
from onnxgrail.methods.refine.mixed import mixed
from onnxgrail.methods.refine.refinement import FIT, Refined, Refinement
from onnxgrail.methods.refine.whole import entry_of

KIND = "laco"
NEAR = 1e-10  # relative squared error below which a block counts as unchanged
RATE, EPOCHS, STEPS, MORE = 1e-2, 10, 200, 2  # learning rate, least epochs and steps, times more steps for `max`
MIXED, ROOM = 6, 1 << 30  # most mixed batches per given one, and most bytes of a block's goals
NOTHING = "no weights of its own, or no input or output of the original's shape to compare"
TAKEN_BACK = "the model's outputs came no closer, so all of it was taken back"


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A chunk of the dense model, its position in the narrowed model, and the tensors to be matched.

    Goals have the names of the dense model.
    """

    name: str
    chunk: Chunk
    begin: int
    end: int
    goals: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A block to fit, its weights, the targets per batch, and the time limit in seconds."""

    block: _Block
    names: Sequence[str]
    targets: Sequence[Mapping[str, Array]]
    seconds: float | None


def laco(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    """Fit every block of the narrowed model in order, each after all upstream fits.

    All fits are taken back if the error of the whole model does not decrease.

    Returns:
        One entry per block, and one for the outputs of the whole model.

    References:
        Algorithm 1 of LaCo: targets from the dense stream, inputs from the compressed one.
    """
    todo = _blocks(job)
    job = mixed(job, _times(job, todo))
    found = trainable(job.slim)
    report: list[Refined] = []
    old: dict[str, ir.TensorProtocol] = {}
    started = time.perf_counter()
    before = job.apart(job.held)
    dense, slim = job.walk(job.prepared.model), job.walk(job.slim)
    weights = [max(len(found.within(b.begin, b.end)), 1) for b in todo]
    total = len(todo) * EPOCHS
    for number, block in enumerate(todo):
        left = job.left()
        seconds = None if left is None else left * weights[number] / sum(weights[number:])
        targets = dense.advance(block.chunk.end, block.goals)
        task = _Task(block, found.within(block.begin, block.end), targets, seconds)
        tick = _ticks(progress, number, total)
        entry, arrays = job.steps.once(
            f"refine {KIND} {number} {block.name}", functools.partial(_fitted, job, task, slim, tick), FIT
        )
        old |= job.write(arrays)
        report.append(entry)
        progress(KIND, (number + 1) * EPOCHS, total)
        if number + 1 < len(todo):
            slim.advance(block.end)
        job.tidy()
    after, outcome = (job.apart(job.held), Outcome()) if old else (before, Outcome(status="plain", reason="no change"))
    if not after <= before:
        job.take_back(old)
        after, outcome = before, Outcome(status="plain", reason=TAKEN_BACK)
    whole = entry_of(KIND, started, outcome, errors=(before, after))
    return (*report, whole)


def _times(job: Refinement, blocks: Sequence[_Block]) -> int:
    """Return the number of mixed batches per given one."""
    facts = job.prepared.survey.facts
    sizes = [facts.bytes_of(n) for block in blocks for n in block.goals]
    return min(MIXED, ROOM // max(max(sizes, default=0) * job.given, 1) - 1)


def _ticks(progress: Progress, number: int, total: int) -> Callable[[], None]:
    epochs = iter(range(1, EPOCHS))

    def tick() -> None:
        progress(KIND, number * EPOCHS + next(epochs, EPOCHS - 1), total)

    return tick


def _blocks(job: Refinement) -> list[_Block]:
    """Return the chunks of the dense model that the narrowed model has, too."""
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
        if not final and not (there and job.alike(chunk.last)):
            continue  # merged with the next chunk
        whole = Chunk(start, chunk.end, chunk.last, chunk.heavy)
        end = len(list(job.slim.graph)) if final else place[job.here(chunk.last)]
        made = {v.name or "" for node in nodes[start : chunk.end] for v in node.outputs}
        ends = [] if final else [n for n in alive.at(chunk.end) if n in found.carriers]
        names = list(dict.fromkeys([*ends, *job.outputs()]))
        goals = tuple(n for n in names if n in made and job.here(n) in place and facts.has_floats(n))
        blocks.append(_Block(_name(nodes[start : chunk.end], found), whole, begin, end, goals))
        begin, start = end, chunk.end
    return blocks


def _name(nodes: Sequence[ir.Node], found: Trainable) -> str:
    """Return the name of the module that contains the matrix products of a chunk."""
    heavy = [n for n in nodes if any(v is not None and v.name in found.matrices for v in n.inputs)]
    return common_scope(heavy or nodes) or key(nodes[-1])


def _fitted(job: Refinement, task: _Task, slim: Walk, tick: Callable[[], None]) -> tuple[Refined, dict[str, Array]]:
    """Fit one block; return its entry, and new weights if they are better."""
    from onnxgrail.torchgraph.fit import Batch, Samples, Settings, fit

    entry = functools.partial(entry_of, KIND, time.perf_counter(), block=task.block.name)
    first = _first(job, task, slim) if task.names else {}
    if not first:
        return entry(Outcome(status="skipped", reason=NOTHING)), {}
    if all(_near(now, wanted) for now, wanted in first.values()):
        return entry(Outcome(status="skipped", reason="as in the original network")), {}

    def batch(number: int) -> Batch:
        return Batch(
            inputs=slim.cache[number],
            goals={job.here(n): job.goal(n, task.targets[number][n]) for n in first},
            mask=job.masks[number],
        )

    steps = STEPS * (MORE if job.recipe.effort == "max" else 1)
    settings = Settings(
        rate=RATE, epochs=EPOCHS, steps=steps, each=job.each, seconds=task.seconds, seed=job.recipe.seed
    )
    learnt, held = ([lambda k=k: batch(k) for k in some] for some in (job.learnt, job.held))
    expected = {job.here(n): now for n, (now, _) in first.items()}
    piece, samples = slim.piece(list(expected)), Samples(learnt, held)
    try:
        done = fit(piece, task.names, samples, settings, expected=expected, tick=tick)
    except UnsupportedOpError as error:
        return entry(Outcome(status="skipped", reason=f"no gradient through {error.op}")), {}
    except ModelError as error:
        return entry(Outcome(status="skipped", reason=error.args[0])), {}
    if not done.arrays:
        outcome = Outcome(status="plain", reason="no better weights on held-out samples")
        return entry(outcome, errors=(done.before, done.before), epochs=done.epochs), {}
    return entry(Outcome(), errors=(done.before, done.after), epochs=done.epochs), dict(done.arrays)


def _first(job: Refinement, task: _Task, slim: Walk) -> dict[str, tuple[Array, Array]]:
    """Return the present value and the target of each goal in the first batch, if these agree in shape."""
    goals, number = task.block.goals, job.learnt[0]
    if not goals:
        return {}
    made = slim.source([job.here(n) for n in goals])(number)
    pairs = {n: (made[job.here(n)], job.goal(n, task.targets[number][n])) for n in goals}
    return {n: (now, wanted) for n, (now, wanted) in pairs.items() if now.shape == wanted.shape}


def _near(a: Array, b: Array) -> bool:
    wide, goal = (np.asarray(x, dtype=np.float64) for x in (a, b))
    return bool(np.square(wide - goal).sum() <= NEAR * np.square(goal).sum())
