"""What the data say: how redundant layers are, and what the matrices behind the kept directions should be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail import slots
from onnxgrail.algebra.refit import MARGIN, Fitted, Moments, moments, refit, zero_moments
from onnxgrail.calibration.signature import padding_mask
from onnxgrail.calibration.walk import Walk
from onnxgrail.core import Array, Bools, Feed, Ints, Recipe
from onnxgrail.graph.assign import assign
from onnxgrail.graph.attributes import number
from onnxgrail.graph.facts import key
from onnxgrail.graph.interface import between, fit
from onnxgrail.graph.lowrank import Factored, Matrix
from onnxgrail.graph.residual import Layer
from onnxgrail.preparation import Prepared

UNKNOWN = 0.5  # cosine of what cannot be compared
FOLDS, FEW, SURE = 4, 64, 0.1  # of the samples; below so many each fold judges in turn, and must win that share
ROWS = 65536  # that a fit looks at

Tick = Callable[[], None]


def feeds_of(prepared: Prepared, model: ir.Model) -> list[Callable[[], Feed]]:
    """The calibration batches as a narrowed model takes them: key-value caches that are inputs may have lost heads."""
    ports = between(prepared.model, model)
    return [functools.partial(_fitting, make, ports) for make in prepared.batches.feeds]


def _fitting(make: Callable[[], Feed], ports: object) -> Feed:
    return fit(make(), ports)  # type: ignore[arg-type]


def masks_of(prepared: Prepared) -> list[Bools | None]:
    """Per batch, which positions are real."""
    return [padding_mask(feed) for feed in prepared.batches]


def walk_of(prepared: Prepared, model: ir.Model, recipe: Recipe) -> Walk:
    """All batches at the entrance of a model."""
    feeds = (make() for make in feeds_of(prepared, model))
    return Walk(model, prepared.survey.facts, feeds, providers=recipe.providers)


def redundancies(walk: Walk, layers: Sequence[Layer], masks: Sequence[Bools | None], tick: Tick) -> dict[str, float]:
    """Per layer the mean cosine between what goes in and what comes out, over all tokens that are not padding.

    References:
        Liu et al. 2024 (GRASP), arXiv:2501.00339, equation 1; one minus it is the block influence of ShortGPT.
    """
    wanted = list(dict.fromkeys(n for layer in layers for n in (layer.begin, layer.end)))
    fetch = [name for name in wanted if name not in walk.cache[0]]
    source = walk.source(fetch)
    sums = {layer.name: np.zeros(2) for layer in layers}
    for batch, mask in enumerate(masks):
        found = {**walk.cache[batch], **source(batch)}
        for layer in layers:
            sums[layer.name] += _cosines(found[layer.begin], found[layer.end], mask)
        tick()
    return {name: float(total / count) if count else UNKNOWN for name, (total, count) in sums.items()}


def _cosines(first: Array, last: Array, mask: Bools | None) -> Array:
    """Sum of the cosines of all rows, and how many there are."""
    if first.shape != last.shape or first.ndim < 2:
        return np.zeros(2)
    a, b = (_rows(array, mask).astype(np.float64) for array in (first, last))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = np.einsum("nd,nd->n", a, b) / norms
    return np.array([np.where(np.isfinite(cosines), cosines, UNKNOWN).sum(), len(cosines)])


def _rows(array: Array, mask: Bools | None) -> Array:
    """(tokens, channels) of (batch, length, channels) or of what is flat already, without padding."""
    flat = array.reshape(-1, array.shape[-1])
    fits = mask is not None and array.shape[:-1] in (mask.shape, (mask.size,))
    return flat[mask.ravel()] if fits and mask is not None else flat


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A matrix that was replaced, with what it became; `begin` is the first node of its layer, if it is in one."""

    matrix: Matrix
    now: Factored
    begin: ir.Node | None


def refitted(
    prepared: Prepared, recipe: Recipe, reference: ir.Model, slim: ir.Model, tasks: Sequence[Task], tick: Tick
) -> dict[str, Fitted]:
    """Fit `up` of every pair to the outputs that the matrix had, behind the pairs that are fitted already.

    The kept directions stay: with z = x down, `up` minimises |x0 W - z up|^2 + lambda |up - up0|^2, where x0 is the
    input in the reference and x the one it has now.  Strength and share of the way are chosen on held-out samples, and
    what does not win there stays as the singular values made it.

    Args:
        prepared: the data.
        recipe: seed and providers.
        reference: the model before anything was replaced.
        slim: the model with all pairs in place; their second weights get new numbers.
        tasks: pairs in the order of the network.
        tick: called once per pair.

    Returns:
        Per weight, errors as shares of the outputs' energy, without and with the fit.
    """
    dense, narrow = (walk_of(prepared, model, recipe) for model in (reference, slim))
    places = [{key(node): p for p, node in enumerate(model.graph)} for model in (reference, slim)]
    positions = [0, 0]
    masks = masks_of(prepared)
    found: dict[str, Fitted] = {}
    for task in tasks:
        if task.begin is not None:
            new = [place.get(key(task.begin), 0) for place in places]
            if all(n > p for n, p in zip(new, positions, strict=True)):
                dense.advance(new[0])
                narrow.advance(new[1])
                positions = new
        found[task.matrix.weight] = _fitted(slim, task, dense, narrow, masks, recipe.seed)
        tick()
    return found


def _fitted(slim: ir.Model, task: Task, dense: Walk, narrow: Walk, masks: Sequence[Bools | None], seed: int) -> Fitted:
    value = slim.graph.initializers[task.now.up]
    assert value.const_value is not None
    stored = value.const_value.numpy()
    start = (stored.T if task.now.turned else stored).astype(np.float64)
    folds = _sums(task, start, dense, narrow, masks, seed)
    few = sum(fold.count > 0 for fold in folds) == FOLDS and _samples(dense) < FEW
    (best,) = refit(folds, [[start]], affine=False, judges=FOLDS if few else 1, margin=SURE if few else MARGIN)
    if best.alpha is not None:
        limit = slots.largest(stored.dtype)
        array = np.clip(best.weights, -limit, limit)
        assign(value, np.ascontiguousarray(array.T if task.now.turned else array).astype(stored.dtype))
    return best


def _samples(walk: Walk) -> int:
    sizes = [{a.shape[0] if a.ndim else 1 for a in batch.values()} for batch in walk.cache]
    return sum(size.pop() if len(size) == 1 else 1 for size in sizes)


def _sums(
    task: Task, start: Array, dense: Walk, narrow: Walk, masks: Sequence[Bools | None], seed: int
) -> list[Moments]:
    """Moments of z and of what `up` should make of it, by fold."""
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
    task: Task, start: Array, goal: Mapping[str, Array], now: Mapping[str, Array], mask: Bools | None
) -> Iterator[tuple[Array, Array, Ints]]:
    """Per product: z, what it should become behind `up`, and the sample of every row.

    The product's bias is in both outputs and falls out.
    """
    for node in task.matrix.nodes:
        name = key(node)
        scale = number(node, "alpha", 1.0) if node.op_type != "MatMul" else 1.0
        z, y, wanted = (_rows(a, mask).astype(np.float32) for a in (now[task.now.between[name]], now[name], goal[name]))
        whole = np.arange(goal[name].shape[0]) if goal[name].ndim > 2 else None
        rows = int(np.prod(goal[name].shape[:-1]))
        sample = np.repeat(whole, rows // len(whole)) if whole is not None else np.arange(rows)
        yield z, z @ start.astype(np.float32) + (wanted - y) / scale, _sample(sample, goal[name], mask)


def _sample(sample: Ints, like: Array, mask: Bools | None) -> Ints:
    """The sample of every row that is not padding."""
    fits = mask is not None and like.shape[:-1] in (mask.shape, (mask.size,))
    return sample[mask.ravel()] if fits and mask is not None else sample


def _some(count: int, wanted: int, rng: np.random.Generator) -> Ints:
    return np.arange(count) if count <= wanted else np.sort(rng.choice(count, wanted, replace=False))
