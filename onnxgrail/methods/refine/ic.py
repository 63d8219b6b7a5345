"""Input compensation: a small pool of additions to the input, fitted so that the narrowed network acts as the dense."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np

from onnxgrail.core import Array, Outcome
from onnxgrail.errors import ModelError
from onnxgrail.graph.cost import counting
from onnxgrail.graph.fittable.pool import Entry, Plan, border_of, entry_of, insert, plan_of, strips
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.machine.progress import Progress
from onnxgrail.methods.refine import whole as fits
from onnxgrail.methods.refine.refinement import Refined, Refinement
from onnxgrail.methods.refine.whole import whole

KIND = "ic"
RATE, STEPS = 3e-2, 1200
RANK = 32  # at most, if nobody asks: the paper finds 16 to 32 enough
SHARE = 0.03  # of the narrowed model's parameters, at most


def ic(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    """Put a pool of keys and values in front of the narrowed model, or behind its embedding, and fit it alone.

    Values begin at zero, so that the fit begins at the model as it is; where held-out batches come no closer to the
    dense network's outputs, the model stays without a pool.

    References:
        Enhancing Pruned Models by Input Compensation, eq. 5 and 7 and algorithm 1, the variant without labels.
    """
    started = time.perf_counter()
    facts = job.own()  # an embedding may have lost features
    try:
        entry = entry_of(job.slim, facts)
        plan = _plan(job, entry)
    except ModelError as error:
        return (fits.entry_of(KIND, started, Outcome(status="skipped", reason=error.args[0])),)
    size = _size(job, entry)
    keys, values = _begin(entry, plan, size, np.random.default_rng(job.recipe.seed))
    trial = dataclasses.replace(job, slim=copy(job.slim))
    names = insert(trial.slim, entry, plan, keys, values)
    sizes = dict.fromkeys(names[1::2], size)
    found, arrays = whole(trial, KIND, names, progress, rate=RATE, steps=STEPS, sizes=sizes)
    if not arrays:
        return (found,)
    fitted = [arrays[name] for name in names]
    insert(job.slim, entry, plan, fitted[::2], fitted[1::2])
    spent = time.perf_counter() - started
    return (dataclasses.replace(found, seconds=spent, added=_added(entry, plan, facts)),)


def _plan(job: Refinement, entry: Entry) -> Plan:
    """A pool of the rank that was asked for, whatever it costs, or the largest within the usual share."""
    opset = job.slim.graph.opset_imports.get("", 13)
    asked = job.recipe.ic_rank
    limit = int(SHARE * counting.parameters(job.slim)) if asked is None else None
    return plan_of(entry, opset, limit=limit, rank=asked or RANK)


def _begin(entry: Entry, plan: Plan, size: float, rng: np.random.Generator) -> tuple[list[Array], list[Array]]:
    """Keys that tell queries of this size apart, divided by sqrt(d_e) already, and values of nothing."""
    sides = [math.prod(s) for s in strips(entry, border_of(entry))] if plan.form == "frame" else [plan.value]
    scale = 1.0 / (size * math.sqrt(plan.query))
    keys = [rng.normal(size=(plan.query, plan.rank)) * scale for _ in sides]
    return keys, [np.zeros((plan.rank, width)) for width in sides]


def _size(job: Refinement, entry: Entry) -> float:
    """Root mean square of what is compensated, in the first batch."""
    walk = job.walk(job.slim)
    known = walk.cache[0].get(entry.value)
    array = walk.source([entry.value])(0)[entry.value] if known is None else known
    return float(np.sqrt(np.square(array, dtype=np.float64).mean())) or 1.0


def _added(entry: Entry, plan: Plan, facts: Facts) -> dict[str, Any]:
    """For the report: what the pool is, and what it costs per sample."""
    positions = 1 if entry.image else math.prod(facts.shapes[entry.value][1:-1])
    return {
        "form": plan.form,
        "at": entry.value,
        "rank": plan.rank,
        "params": plan.parameters,
        "macs": plan.macs(positions),
        "bytes": int(plan.parameters * entry.dtype.itemsize),
    }
