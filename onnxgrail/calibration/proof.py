"""Exact before clever: every block must pass the mask oracle on this very model before anything is decided.

The graph with some units of each block removed is run beside the original with the dropped rows of every consumer set
to zero.  Where they differ, or the narrowed graph does not run, the blocks to blame are found by bisection and left
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.relay import in_pieces
from onnxgrail.calibration.session import open_session
from onnxgrail.core import Array, Block, Bools, Feed, Refusal
from onnxgrail.errors import ModelError, RewriteError
from onnxgrail.graph import weights
from onnxgrail.graph.interface import Port, changed, fit
from onnxgrail.graph.mapped import discard
from onnxgrail.graph.rewrite import apply
from onnxgrail.graph.serial import pack
from onnxgrail.graph.survey import Ledger, Survey

LIMITS = {2: 2e-2, 4: 5e-5, 8: 1e-9}  # relative error allowed per itemsize of the model's floats
QUANTISED = 1e-3
TOGETHER = "narrowing it together with the others does not give the masked result"


class Runner(Protocol):
    """Runs a candidate on all feeds, as a whole or, where it is deep and that will do, in pieces."""

    def __call__(self, candidate: ir.Model, ports: Sequence[Port], *, whole: bool) -> list[dict[str, Array]]:
        """Outputs by name, per feed."""


def prove(
    model: ir.Model,
    survey: Survey,
    blocks: Sequence[Block],
    widths: Mapping[str, int],
    feed: Feed,
    *,
    providers: Sequence[str],
    dead: Bools | None = None,
) -> tuple[tuple[Block, ...], tuple[Refusal, ...]]:
    """Blocks that narrow exactly, and refusals for the others.

    Args:
        model: the graph; not changed.
        survey: its trace.
        blocks: candidates.
        widths: units each keeps, by name.
        feed: one small feed.
        providers: execution providers.
        dead: the units that are to go; drawn at random where that is not known yet.
    """

    def run(candidate: ir.Model, ports: Sequence[Port], *, whole: bool) -> list[dict[str, Array]]:
        given = [fit(f, ports) for f in feeds]
        parts = None if whole else in_pieces(candidate, given, providers)
        if parts is not None:
            discard(candidate)
            return parts
        with open_session(pack(candidate), optimise=False, once=True, providers=providers) as session:
            discard(candidate)
            return [session.run(f) for f in given]

    other = survey.facts.other  # a size that was written down as a number shows there
    feeds = [feed, *survey.facts.more, *([] if other is None else [other])]
    limit = _limit(model)
    doubts: dict[str, str] = {}

    def holds(some: Sequence[Block]) -> bool:
        gone = _sample(survey, some, widths) if dead is None else _among(survey, some, dead)
        why = _doubt(model, survey, some, gone, run, limit)
        if why and len(some) == 1:
            doubts[some[0].name] = why
        return not why

    good = _passing(list(blocks), holds)
    names = {b.name for b in good}
    return tuple(good), tuple(_refusal(b, doubts.get(b.name, TOGETHER)) for b in blocks if b.name not in names)


def _refusal(block: Block, reason: str) -> Refusal:
    return Refusal(value=block.slots[0].initializer, node=block.nodes[0], op=block.kind, reason=reason)


def _passing(blocks: list[Block], holds: Callable[[Sequence[Block]], bool]) -> list[Block]:
    """A largest-effort subset that holds together: bisect, then join the halves that survive."""
    if not blocks or holds(blocks):
        return blocks
    if len(blocks) == 1:
        return []
    middle = len(blocks) // 2
    first, second = _passing(blocks[:middle], holds), _passing(blocks[middle:], holds)
    joined = first + second
    if not first or not second or holds(joined):
        return joined
    for block in second:  # each half is sound alone: add what fits
        if holds([*first, block]):
            first = [*first, block]
    return first


def _doubt(
    model: ir.Model,
    survey: Survey,
    blocks: Sequence[Block],
    dead: Bools,
    run: Runner,
    limit: float,
) -> str:
    """Why narrowing these blocks is not exact; '' when it is."""
    ports = changed(model, survey, dead)
    slim = model.clone()
    try:
        apply(slim.graph, survey, Ledger(dead=dead, arrays={}))
        got = run(slim, ports, whole=True)  # as it will be loaded
    except (ModelError, RewriteError) as error:
        return f"the narrowed graph does not run: {error}"
    masked = model.clone()
    apply(masked.graph, survey, Ledger(dead=np.zeros_like(dead), arrays=_masked(model, survey, blocks, dead)))
    wanted = [fit(found, ports) for found in run(masked, (), whole=False)]
    return next((why for a, b in zip(got, wanted, strict=True) if (why := _gap(a, b, limit))), "")


def _gap(got: Mapping[str, Array], wanted: Mapping[str, Array], limit: float) -> str:
    """What differs between two runs; '' when nothing does."""
    for name, array in wanted.items():
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            if got[name].shape != array.shape:
                return f"output {name} changes its shape from {array.shape} to {got[name].shape}"
            gap = _distance(got[name], array)
            if not gap <= limit:
                return f"the narrowed graph differs from the masked one by {gap:.1e} at output {name}"
    return ""


def _sample(survey: Survey, blocks: Sequence[Block], widths: Mapping[str, int]) -> Bools:
    """Units to remove for the proof: drawn at random, at least one per block."""
    rng = np.random.default_rng(0)
    dead = np.zeros(survey.ids, dtype=bool)
    for block in blocks:
        kept = min(widths[block.name], block.units - 1)
        dead[block.ids[rng.permutation(block.units)[kept:]]] = True
    return dead


def _among(survey: Survey, blocks: Sequence[Block], dead: Bools) -> Bools:
    """Of the units that go, those of some blocks."""
    mine = np.zeros(survey.ids, dtype=bool)
    for block in blocks:
        mine[block.ids] = True
    return np.asarray(dead & mine)


def _masked(model: ir.Model, survey: Survey, blocks: Sequence[Block], dead: Bools) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for block in blocks:
        for slot in block.consumers:
            array = arrays.get(slot.param)
            array = np.array(weights.original(slot.initializer, model, survey) if array is None else array)
            np.moveaxis(array, slot.axis, 0)[slot.index[dead[block.ids]].ravel()] = 0
            arrays[slot.param] = weights.put(array, model.graph.initializers.get(slot.initializer))
    return arrays


def _distance(a: Array, b: Array) -> float:
    """Largest difference relative to the largest value; positions that are NaN in both agree."""
    if not b.size:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = np.isnan(a) & np.isnan(b) | (a == b)
    gap = np.where(same, 0.0, np.abs(a - b))
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return float(gap.max() / max(scale, 1e-6))


def _limit(model: ir.Model) -> float:
    kinds = {v.const_value.dtype for v in model.graph.initializers.values() if v.const_value is not None}
    if kinds & {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4}:
        return QUANTISED
    sizes = [k.itemsize for k in kinds if k.is_floating_point()]
    return LIMITS.get(int(min(sizes, default=4)), LIMITS[2])
