"""Fits the second matrix of each pair to the outputs of the replaced matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.fit.choice import MARGIN, Fitted, Rules
from onnxgrail.algebra.fit.refit import refit
from onnxgrail.algebra.moments.regression import Moments, moments, zero_moments
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Array, Bools, Floats, Ints, Recipe
from onnxgrail.graph import slots
from onnxgrail.graph.attributes import number
from onnxgrail.graph.fittable.matrices import Factored, Matrix
from onnxgrail.graph.rewrite.assign import assign
from onnxgrail.graph.trace.facts import key
from onnxgrail.machine.progress import Tick
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.methods.grasp.codecs import FIT, fit_key
from onnxgrail.methods.grasp.measure import Cursor, rows_of, unpadded, walk_of

# Folds of the samples; with fewer than FEW samples, every fold judges and the error must fall by the share SURE.
FOLDS, FEW, SURE = 4, 64, 0.1
ROWS = 65536  # rows to fit on


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A replaced matrix and its factors; `begin` is the first node of its layer, None outside all layers."""

    matrix: Matrix
    now: Factored
    begin: ir.Node | None


def refitted(
    prepared: Prepared,
    recipe: Recipe,
    models: tuple[ir.Model, ir.Model],
    tasks: Sequence[Task],
    steps: Steps,
    tick: Tick,
) -> dict[str, Fitted]:
    """Fit `up` of every pair to the outputs of the original matrix, after all upstream fits.

    The kept directions stay: with z = x down, `up` minimizes |x0 W - z up|^2 + lambda |up - up0|^2, where x0 is the
    input in the reference and x the present input. Ridge and step length are chosen on held-out samples; a fit that is
    not better there is dropped.

    Args:
        prepared: the data.
        recipe: seed and providers.
        models: the reference, and the model with all pairs in place, whose second weights are overwritten.
        tasks: pairs in the order of the network.
        steps: cached fits are taken from here; activations are computed up to the first missing one.
        tick: called once per pair.

    Returns:
        Per weight, errors as shares of the outputs' energy, without and with the fit.
    """
    dense, narrow = (Cursor(walk_of(prepared, model, recipe), model) for model in models)
    stored = {task.matrix.weight: steps.known(fit_key(task.matrix.weight)) for task in tasks}
    known = {weight: None if record is None else FIT.decode(record) for weight, record in stored.items()}
    missing = sum(one is None for one in known.values())
    found: dict[str, Fitted] = {}
    for task in tasks:
        weight = task.matrix.weight
        if missing:
            for cursor in (dense, narrow):
                cursor.to(task.begin)
        one = known[weight]
        if one is None:
            one = _fitted(prepared, recipe, models[1], task, (dense.walk, narrow.walk))
            steps.keep(fit_key(weight), FIT.encode(one))
            missing -= 1
        found[weight], up = one
        assign(models[1].graph.initializers[task.now.up], up)
        tick()
    return found


def ups(slim: ir.Model, tasks: Sequence[Task]) -> dict[str, ir.TensorProtocol | None]:
    """Return the present second weights of all pairs."""
    return {task.now.up: slim.graph.initializers[task.now.up].const_value for task in tasks}


def _fitted(
    prepared: Prepared, recipe: Recipe, slim: ir.Model, task: Task, walks: tuple[Walk, Walk]
) -> tuple[Fitted, Array]:
    """Return the fit, and the values for `up` in the layout of the model."""
    value = slim.graph.initializers[task.now.up]
    assert value.const_value is not None
    stored = value.const_value.numpy()
    start = (stored.T if task.now.turned else stored).astype(np.float64)
    folds = _sums(task, start, walks, prepared.masks(), recipe.seed)
    few = prepared.batches.samples < FEW and all(fold.count for fold in folds)
    rules = Rules(affine=False, judges=FOLDS if few else 1, margin=SURE if few else MARGIN)
    (best,) = refit(folds, [[start]], rules)
    if best.alpha is None:
        return best, stored
    array = slots.clamped(best.weights, stored.dtype)
    return best, np.ascontiguousarray(array.T if task.now.turned else array)


def _sums(
    task: Task, start: Floats, walks: tuple[Walk, Walk], masks: Sequence[Bools | None], seed: int
) -> list[Moments]:
    """Compute moments of z and of the target outputs of `up`, by fold."""
    dense, narrow = walks
    outputs = list(task.now.between)
    wanted, got = dense.source(outputs), narrow.source([*task.now.between.values(), *outputs])
    folds = [zero_moments(*start.shape) for _ in range(FOLDS)]
    rng, first = np.random.default_rng(seed), 0
    for batch, mask in enumerate(masks):
        goal, now = wanted(batch), got(batch)
        for z, t, sample in _pairs(task, start, goal, now, mask):
            some = _some(len(z), max(ROWS, 16 * len(start)) // len(masks) + 1, rng)
            number_of = (sample[some] + first) % FOLDS
            for fold in range(FOLDS):
                mine = some[number_of == fold]
                folds[fold] = folds[fold] + moments(z[mine], t[mine])
        first += max(goal[outputs[0]].shape[0], 1)
    return folds


def _pairs(
    task: Task, start: Floats, goal: Mapping[str, Array], now: Mapping[str, Array], mask: Bools | None
) -> Iterator[tuple[Array, Array, Ints]]:
    """Yield per product: z, the target outputs of `up`, and the sample of every row.

    The product's bias is in both outputs and cancels.
    """
    for node in task.matrix.nodes:
        name = key(node)
        scale = number(node, "alpha", 1.0) if node.op_type != "MatMul" else 1.0
        z, y, wanted = (
            rows_of(a, mask).astype(np.float32) for a in (now[task.now.between[name]], now[name], goal[name])
        )
        whole = np.arange(goal[name].shape[0]) if goal[name].ndim > 2 else None
        rows = int(np.prod(goal[name].shape[:-1]))
        sample = np.repeat(whole, rows // len(whole)) if whole is not None else np.arange(rows)
        yield z, z @ start.astype(np.float32) + (wanted - y) / scale, unpadded(sample, goal[name], mask)


def _some(count: int, wanted: int, rng: np.random.Generator) -> Ints:
    return np.arange(count) if count <= wanted else np.sort(rng.choice(count, wanted, replace=False))
