"""Computes regional gradients of the original network, summed per unit, for `--selector wandapp`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onnxgrail.calibration.feeds.signature import padding_mask, signature_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.latency import single
from onnxgrail.calibration.stream.sizes import rows_per_sample
from onnxgrail.calibration.stream.walk import Walk
from onnxgrail.core import Block, Bools, Feed, Floats, Recipe, Slot
from onnxgrail.errors import UnsupportedOpError
from onnxgrail.graph import slots
from onnxgrail.graph.cuts.chunks import chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.flatten.branches import Route, resolved
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.progress import Progress

SAMPLES = 32
STAGE = "gradients"


def regional_gradients(
    prepared: Prepared, blocks: Sequence[Block], recipe: Recipe, progress: Progress
) -> dict[str, Floats]:
    """Compute the gradients of all blocks for `View.gradient`.

    In a model with branches, only samples that take the most frequent branches count.

    Returns:
        Block name to (u,) gradients; zeros if no region contains a consumer's weight alone.

    Raises:
        UnsupportedOpError: a region has an op without a gradient.
    """
    found = {b.name: np.zeros(b.units) for b in blocks}
    routes = Counter(prepared.routes.values())
    route = routes.most_common(1)[0][0] if routes else frozenset()
    model, facts = resolved(prepared.model, route), prepared.survey.facts
    known, nodes = trainable(model), list(model.graph)
    feeds = list(_samples(prepared, route))
    masks = [padding_mask(feed) for feed in feeds]
    walk = Walk(model, facts, feeds, providers=recipe.providers)
    alive = lives(model, facts, [1] * len(nodes))
    regions = chunks(model, known, alive)
    readers = _readers(blocks)
    for number, region in enumerate(regions):
        progress(STAGE, number, len(regions))
        mine = [n for n in known.within(region.begin, region.end) if n in readers]
        final = number + 1 == len(regions)
        made = {v.name for node in nodes[region.begin : region.end] for v in node.outputs}
        ends = [] if final else alive.at(region.end)
        ends = list(dict.fromkeys([*ends, *(v.name or "" for v in model.graph.outputs)]))  # and model outputs
        goals = [n for n in ends if n in made and n in known.carriers and facts.has_floats(n)]
        if mine and goals:
            for name, sizes in _sizes(walk, goals, mine, masks).items():
                for block, slot in readers[name]:
                    found[block.name] += _per_unit(prepared, block, slot, sizes)
        if not final:
            walk.advance(region.end)
    progress(STAGE, len(regions), len(regions))
    return found


def _sizes(
    walk: Walk, goals: Sequence[str], names: Sequence[str], masks: Sequence[Bools | None]
) -> Mapping[str, Floats]:
    """Compute the gradient sizes of the named weights of one region."""
    from onnxgrail.torchgraph.slope import gradient_sizes

    expected, piece = walk.source(goals)(0), walk.piece(goals)
    names = [n for n in names if n in piece.graph.initializers]  # other weights don't reach the goals
    try:
        return gradient_sizes(piece, names, zip(walk.cache, masks, strict=True), expected)
    except UnsupportedOpError as error:
        raise UnsupportedOpError(*error.args, hint="Choose --selector wanda for this model", op=error.op) from error


def _readers(blocks: Sequence[Block]) -> dict[str, list[tuple[Block, Slot]]]:
    """Return per consumer weight the blocks and slots that read it."""
    found: dict[str, list[tuple[Block, Slot]]] = {}
    for block in blocks:
        for slot in block.consumers:
            found.setdefault(slot.initializer, []).append((block, slot))
    return found


def _per_unit(prepared: Prepared, block: Block, slot: Slot, sizes: Floats) -> Floats:
    """Sum gradient times absolute weight per unit, divided by the root of the rows per sample."""
    survey = prepared.survey
    weight = slots.read(weights.original(slot.initializer, prepared.model, survey), slot)
    total: Floats = (np.abs(weight) * slots.read(sizes, slot)).sum(axis=(1, 2))
    probe = None if slot.probe is None else block.probes[slot.probe]
    rows = 1.0 if probe is None else max(rows_per_sample(probe, survey, prepared.samples), 1.0)
    return np.asarray(total / math.sqrt(rows))


def _samples(prepared: Prepared, route: Route) -> Iterator[Feed]:
    """Yield single samples from batches spread over the data, all along one route."""
    signature = signature_of(prepared.model)
    makers = [make for make in prepared.batches.feeds if prepared.routes.get(make, route) == route]
    each = -(-SAMPLES // len(makers))
    for make in makers[:: -(-len(makers) // SAMPLES)]:
        feed = make()
        first = single(feed, signature)
        if all(a.shape == feed[n].shape for n, a in first.items()):
            yield first
            continue
        rows = min(next(iter(feed.values())).shape[0], each)
        yield from ({n: feed[n][k : k + 1] for n in first} for k in range(rows))
