"""Layer-wise compensation: fits block by block to the dense outputs, from the narrowed network's inputs."""

from __future__ import annotations

import dataclasses
import functools
import math
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
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.scopes import common_scope
from onnxgrail.machine.progress import Progress
from onnxgrail.methods.refine.codec import FIT
from onnxgrail.methods.refine.mixed import mixed
from onnxgrail.methods.refine.refinement import Refined, Refinement
from onnxgrail.methods.refine.whole import entry_of

KIND = "laco"
NEAR = 1e-10  # relative squared error below which a block counts as unchanged
RATE, EPOCHS, STEPS = 1e-2, 10, 400  # learning rate, least epochs, least steps
MIXED, ROOM = 6, 1 << 30  # most mixed batches per given one, and most bytes of a block's goals
# Wanda++ takes 160 steps of 3e-7 without a schedule; here the rate is relative to a weight's size.
ROUNDS, SAMPLES, SMALL = 5, 32, 1e-3
NOTHING = "no weights of its own, or no input or output of the original's shape to compare"
TAKEN_BACK = "the model's outputs came no closer, so all of it was taken back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The settings of block-wise fits.

    Attributes:
        kind: for the report.
        rate, epochs, steps: as in `Settings`.
        samples: number of random samples to learn from; None for all.
        same: True if targets are the dense block's outputs for the narrowed block's input, not for its own input.
    """

    kind: str
    rate: float
    epochs: int
    steps: int
    samples: int | None = None
    same: bool = False


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
    """A block to fit, the settings, and the time limit in seconds."""

    preset: Preset
    block: _Block
    seconds: float | None


def laco(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    """Fit every block of the narrowed model in order, each after all upstream fits.

    Returns:
        One entry per block, and one for the outputs of the whole model.

    References:
        Algorithm 1 of LaCo: targets from the dense stream, inputs from the compressed one.
    """
    preset = Preset(kind=KIND, rate=RATE, epochs=EPOCHS, steps=STEPS)
    blocks = _blocks(job)
    return _by_block(mixed(job, _times(job, blocks)), blocks, preset, progress)


def regional(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    """Fit every block with few samples and small steps to the original block's outputs for the same input.

    References:
        Regional optimization of Wanda++: five rounds over 32 random samples. No mask is chosen again here.
    """
    preset = Preset(kind="regional", rate=SMALL, epochs=ROUNDS, steps=ROUNDS * SAMPLES, samples=SAMPLES, same=True)
    return _by_block(job, _blocks(job), preset, progress)


def _by_block(job: Refinement, todo: Sequence[_Block], preset: Preset, progress: Progress) -> tuple[Refined, ...]:
    """Fit every block in order; revert all fits if the error of the whole model does not decrease."""
    found = trainable(job.slim)
    report: list[Refined] = []
    old: dict[str, ir.TensorProtocol] = {}
    started = time.perf_counter()
    before = job.apart(job.held)
    dense, slim = job.walk(job.prepared.model), job.walk(job.slim)
    weights = [max(len(found.within(b.begin, b.end)), 1) for b in todo]
    total = len(todo) * preset.epochs
    job = dataclasses.replace(job, few=_drawn(job, preset))
    for number, block in enumerate(todo):
        left = job.left()
        seconds = None if left is None else left * weights[number] / sum(weights[number:])
        alike = not preset.same or _meet(job, dense, slim)
        task = _Task(preset, block if alike else dataclasses.replace(block, goals=()), seconds)
        targets = dense.advance(block.chunk.end, task.block.goals)
        tick = _ticks(progress, preset, number, total)
        key = f"{preset.kind} {number} {block.name}"
        entry, arrays = job.steps.once(
            f"refine {key}", functools.partial(_fitted, job, task, found, slim, targets, tick), FIT
        )
        old |= job.write(arrays)
        report.append(entry)
        progress(preset.kind, (number + 1) * preset.epochs, total)
        if number + 1 < len(todo):
            slim.advance(block.end)
        job.tidy()
    after, outcome = (job.apart(job.held), Outcome()) if old else (before, Outcome(status="plain", reason="no change"))
    if not after <= before:
        job.take_back(old)
        after, outcome = before, Outcome(status="plain", reason=TAKEN_BACK)
    whole = entry_of(preset.kind, started, outcome, errors=(before, after))
    return (*report, whole)


def _times(job: Refinement, blocks: Sequence[_Block]) -> int:
    """Return the number of mixed batches per given one."""
    facts = job.prepared.survey.facts
    sizes = [math.prod(facts.shapes[n]) * facts.dtypes[n].itemsize for block in blocks for n in block.goals]
    return min(MIXED, ROOM // max(max(sizes, default=0) * job.given, 1) - 1)


def _ticks(progress: Progress, preset: Preset, number: int, total: int) -> Callable[[], None]:
    epochs = iter(range(1, preset.epochs))

    def tick() -> None:
        progress(preset.kind, number * preset.epochs + next(epochs, preset.epochs - 1), total)

    return tick


def _drawn(job: Refinement, preset: Preset) -> tuple[int, ...] | None:
    """Return the numbers of random batches to learn from, None for all."""
    if preset.samples is None:
        return None
    each = -(-job.prepared.batches.samples // len(job.prepared.batches))
    count = min(-(-preset.samples // each), len(job.learnt))
    return tuple(sorted(np.random.default_rng(job.recipe.seed).permutation(job.learnt)[:count].tolist()))


def _meet(job: Refinement, dense: Walk, slim: Walk) -> bool:
    """Replace the dense stream's tensors by those of the narrowed stream, if these have the same shapes."""
    shapes = {n: a.shape for n, a in dense.cache[0].items()}
    if any(job.here(n) not in slim.cache[0] or slim.cache[0][job.here(n)].shape != s for n, s in shapes.items()):
        return False
    dense.cache = [{n: cache[job.here(n)] for n in shapes} for cache in slim.cache]
    return True


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


def _fitted(
    job: Refinement,
    task: _Task,
    found: Trainable,
    slim: Walk,
    targets: Sequence[Mapping[str, Array]],
    tick: Callable[[], None],
) -> tuple[Refined, dict[str, Array]]:
    """Fit one block; return its entry, and new weights if they are better."""
    from onnxgrail.torchgraph.fit import Batch, Samples, Settings, fit

    started, preset, block = time.perf_counter(), task.preset, task.block

    def entry(outcome: Outcome, before: float | None = None, after: float | None = None, epochs: int = 0) -> Refined:
        spent = time.perf_counter() - started
        return Refined(
            block=block.name,
            kind=preset.kind,
            before=before,
            after=after,
            epochs=epochs,
            seconds=spent,
            outcome=outcome,
        )

    names = found.within(block.begin, block.end)
    first = _first(job, block, slim, targets) if names else {}
    if not first:
        return entry(Outcome(status="skipped", reason=NOTHING)), {}
    if all(_near(now, wanted) for now, wanted in first.values()):
        return entry(Outcome(status="skipped", reason="as in the original network")), {}

    def batch(number: int) -> Batch:
        return Batch(
            inputs=slim.cache[number],
            goals={job.here(n): job.goal(n, targets[number][n]) for n in first},
            mask=job.masks[number],
        )

    settings = Settings(
        rate=preset.rate,
        epochs=preset.epochs,
        steps=preset.steps,
        each=job.each,
        seconds=task.seconds,
        seed=job.recipe.seed,
    )
    learnt, held = ([lambda k=k: batch(k) for k in some] for some in (job.learnt, job.held))
    expected = {job.here(n): now for n, (now, _) in first.items()}
    try:
        done = fit(slim.piece(list(expected)), names, Samples(learnt, held), settings, expected=expected, tick=tick)
    except UnsupportedOpError as error:
        return entry(Outcome(status="skipped", reason=f"no gradient through {error.op}")), {}
    except ModelError as error:
        return entry(Outcome(status="skipped", reason=error.args[0])), {}
    if not done.arrays:
        outcome = Outcome(status="plain", reason="no better weights on held-out samples")
        return entry(outcome, done.before, done.before, done.epochs), {}
    return entry(Outcome(), done.before, done.after, done.epochs), dict(done.arrays)


def _first(
    job: Refinement, block: _Block, slim: Walk, targets: Sequence[Mapping[str, Array]]
) -> dict[str, tuple[Array, Array]]:
    """Return the present value and the target of each goal in the first batch, if these agree in shape."""
    if not block.goals:
        return {}
    made = slim.source([job.here(n) for n in block.goals])(job.learnt[0])
    pairs = {n: (made[job.here(n)], job.goal(n, targets[job.learnt[0]][n])) for n in block.goals}
    return {n: (now, wanted) for n, (now, wanted) in pairs.items() if now.shape == wanted.shape}


def _near(a: Array, b: Array) -> bool:
    wide, goal = (np.asarray(x, dtype=np.float64) for x in (a, b))
    return bool(np.square(wide - goal).sum() <= NEAR * np.square(goal).sum())
