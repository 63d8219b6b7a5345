"""Input compensation: a small pool of additions to the input, fitted so that the narrowed network acts as the dense."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from onnxgrail.core import Array, Outcome, Progress
from onnxgrail.errors import ModelError
from onnxgrail.graph import cost
from onnxgrail.graph.model_io import copy
from onnxgrail.graph.pool import Entry, Plan, entry_of, insert, plan_of, strips, border_of, SIDES
from onnxgrail.refine import whole as fits
from onnxgrail.refine.job import Job, Refined
from onnxgrail.refine.whole import whole

KIND = "ic"
RATE, STEPS = 3e-2, 1200
RANK = 32  # at most: the paper finds 16 to 32 enough
SHARE = 0.03  # of the narrowed model's parameters, at most


def ic(job: Job, progress: Progress) -> tuple[Refined, ...]:
    """Put a pool of keys and values in front of the narrowed model, or behind its embedding, and fit it alone.

    Values begin at zero, so that the fit begins at the model as it is; where held-out batches come no closer to the
    dense network's outputs, the model stays without it.

    References:
        Input compensation for pruned models, eq. 5 and 7 and algorithm 1, without labels.
    """
    started = time.perf_counter()
    facts = job.prepared.survey.facts
    try:
        entry = entry_of(job.slim, facts.shapes)
        limit = int(SHARE * cost.parameters(job.slim))
        plan = plan_of(entry, job.slim.graph.opset_imports.get("", 13), limit=limit, rank=job.recipe.ic_rank or RANK)
    except ModelError as error:
        return (fits.entry_of(KIND, started, Outcome(status="skipped", reason=error.args[0])),)
    keys, values = _begin(job, entry, plan)
    trial = dataclasses.replace(job, slim=copy(job.slim))
    names = insert(trial.slim, entry, plan, keys, values)
    size = _rms(_sample(job, entry))
    sizes = {name: size for name in names[1::2]}
    found, arrays = whole(trial, KIND, names, progress, rate=RATE, steps=STEPS, sizes=sizes)
    if arrays:
        pairs = [arrays[name] for name in names]
        insert(job.slim, entry, plan, pairs[::2], pairs[1::2])
    return (found,)


def _begin(job: Job, entry: Entry, plan: Plan) -> tuple[list[Array], list[Array]]:
    """Keys that queries of the size at hand tell apart, and values of nothing."""
    rng = np.random.default_rng(job.recipe.seed)
    scale = 1.0 / (_rms(_sample(job, entry)) * np.sqrt(plan.query))
    sizes = [int(np.prod(s)) for s in strips(entry, border_of(entry))] if plan.form == "frame" else [plan.value]
    keys = [rng.normal(size=(plan.query, plan.rank)) * scale for _ in sizes]
    return keys, [np.zeros((plan.rank, size)) for size in sizes]


def _sample(job: Job, entry: Entry) -> Array:
    """What is compensated, of the first batch."""
    walk = job.walk(job.slim)
    found: Array = walk.cache[0].get(entry.value, None)
    return found if found is not None else walk.source([entry.value])(0)[entry.value]


def _rms(array: Array) -> float:
    return float(np.sqrt(np.square(array, dtype=np.float64).mean())) or 1.0
