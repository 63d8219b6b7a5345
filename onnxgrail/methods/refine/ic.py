"""Input compensation: fits a small pool of additions to the input, so that outputs match the dense network's."""

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
from onnxgrail.methods.refine.whole import Descent, whole

KIND = "ic"
RATE, STEPS = 3e-2, 1200
RANK = 32  # largest default; the paper finds 16 to 32 enough
SHARE = 0.03  # largest default share of the narrowed model's parameters


def ic(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    """Add a pool of keys and values at the narrowed model's input, or after its embedding, and fit only the pool.

    Values begin at zero, so that the fit begins at the present model. If the error on held-out batches does not
    decrease, the model gets no pool.

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
    found, arrays = whole(trial, KIND, names, progress, Descent(RATE, STEPS, sizes))
    if not arrays:
        return (found,)
    fitted = [arrays[name] for name in names]
    insert(job.slim, entry, plan, fitted[::2], fitted[1::2])
    spent = time.perf_counter() - started
    return (dataclasses.replace(found, seconds=spent, added=_added(entry, plan, facts)),)


def _plan(job: Refinement, entry: Entry) -> Plan:
    """Return the plan of a pool with the requested rank, or with the largest rank within the default share."""
    opset = job.slim.graph.opset_imports.get("", 13)
    asked = job.recipe.ic_rank
    limit = int(SHARE * counting.parameters(job.slim)) if asked is None else None
    return plan_of(entry, opset, limit=limit, rank=asked or RANK)


def _begin(entry: Entry, plan: Plan, size: float, rng: np.random.Generator) -> tuple[list[Array], list[Array]]:
    """Return random keys, scaled for queries of this size and divided by sqrt(d_e), and zero values."""
    sides = [math.prod(s) for s in strips(entry, border_of(entry))] if plan.form == "frame" else [plan.value]
    scale = 1.0 / (size * math.sqrt(plan.query))
    keys = [rng.normal(size=(plan.query, plan.rank)) * scale for _ in sides]
    return keys, [np.zeros((plan.rank, width)) for width in sides]


def _size(job: Refinement, entry: Entry) -> float:
    """Compute the root mean square of the compensated tensor, in the first batch."""
    walk = job.walk(job.slim)
    known = walk.cache[0].get(entry.value)
    array = walk.source([entry.value])(0)[entry.value] if known is None else known
    return float(np.sqrt(np.square(array, dtype=np.float64).mean())) or 1.0


def _added(entry: Entry, plan: Plan, facts: Facts) -> dict[str, Any]:
    """Return the description of the pool and its cost per sample, for the report."""
    positions = 1 if entry.image else math.prod(facts.shapes[entry.value][1:-1])
    return {
        "form": plan.form,
        "at": entry.value,
        "rank": plan.rank,
        "params": plan.parameters,
        "macs": plan.macs(positions),
        "bytes": int(plan.parameters * entry.dtype.itemsize),
    }
