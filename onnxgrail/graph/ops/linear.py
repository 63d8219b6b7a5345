"""MatMul and Gemm: a constant matrix consumes the last axis and produces a new one; products of activations mix."""

from __future__ import annotations

from dataclasses import replace

from onnxgrail.core import Ints
from onnxgrail.graph.flow import Site
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.ops.broadcast import UNLABELLED, Operand, combine
from onnxgrail.graph.ops.cache import adopt, is_input
from onnxgrail.graph.ops.rule import rule

FIXED = "the activation it reads carries no channels that can be narrowed"
LEFT = "the constant stands on the left and mixes this axis"
BATCHED = "its weight has batch axes"
SHARED = "it is one value head that several query heads read; it stays, query heads can go"
CONTRACTED = "it is contracted with another activation"


@rule("MatMul")
def matmul(site: Site) -> None:
    """A constant right operand consumes the last axis and produces one; two activations tie what they mix (heads)."""
    constant = [site.is_constant(k) for k in (0, 1)]
    ranks = [len(site.shape(k)) for k in (0, 1)]
    if constant == [False, True] and ranks[1] == 2:
        linear(site, 0, 1, inward=0, outward=1)
    elif constant == [True, False]:
        _left(site)
    elif constant == [False, True]:
        stuck = [m for m in site.marks(0) if set(m.axes) & ({ranks[0] - 1} | set(range(max(ranks[0] - 2, 0))))]
        site.freeze(stuck, BATCHED)
        site.emit(m for m in site.marks(0) if m.axes == (ranks[0] - 2,))
    elif min(ranks) >= 2:
        product(site)
    else:
        site.freeze([*site.marks(0), *site.marks(1)], "one operand is a vector")


@rule("Gemm")
def gemm(site: Site) -> None:
    """A constant B consumes the last axis and produces one; the bias is cut with the outputs."""
    transposed = int(site.attribute("transB", 0))
    if not site.is_constant(1) or site.attribute("transA", 0):
        site.freeze([m for k in site.operands for m in site.marks(k)], "only a constant B without transA is handled")
        return
    linear(site, 0, 1, inward=1 if transposed else 0, outward=0 if transposed else 1, bias=2)


def linear(site: Site, x: int, w: int, *, inward: int, outward: int, bias: int | None = None) -> None:
    """A matrix that consumes `x`'s last axis through its axis `inward` and produces through `outward`."""
    last = len(site.shape(x)) - 1
    consumed, produced = site.weight(w, inward), site.weight(w, outward)
    passing = []
    fed = False
    for mark in site.marks(x):
        if last in mark.axes:
            site.union(site.collapse(mark, last), consumed)
            fed = True
        else:
            passing.append(mark)
    if not fed:
        site.freeze([Mark((inward,), consumed)], FIXED)
    site.carry(w, Mark((inward,), consumed), "consumer", (site.name(x), last))
    site.carry(w, Mark((outward,), produced), "producer")
    if bias is not None and site.name(bias):
        _bias(site, bias, produced)
    rank = len(site.out_shape())
    site.emit([*passing, Mark((rank - 1,), produced)])


def _bias(site: Site, operand: int, produced: Ints) -> None:
    """A bias of full width is cut with the outputs; one that is the same for all stays."""
    shape = site.shape(operand)
    if not shape or shape[-1] == 1:
        return
    if site.is_constant(operand):
        site.carry(operand, Mark((len(shape) - 1,), produced))
    else:
        site.freeze([Mark((0,), produced), *site.marks(operand)], "its bias is computed at run time")


def _left(site: Site) -> None:
    """W @ x: the axis before the last is mixed, the last passes."""
    rank = len(site.shape(1))
    outer = set(range(rank - 2)) if len(site.shape(0)) > 2 else set()
    stuck = [m for m in site.marks(1) if set(m.axes) & ({rank - 2} | outer)]
    site.freeze(stuck, LEFT)
    shift = len(site.out_shape()) - rank
    site.emit(
        Mark(tuple(a + shift for a in m.axes), m.labels)
        for m in site.marks(1)
        if not set(m.axes) & ({rank - 2} | outer)
    )


def product(site: Site, *, transposed: tuple[bool, bool] = (False, False)) -> None:
    """Two activations: what is contracted becomes one unit, batch axes (heads) are tied between the operands."""
    shape = site.out_shape()
    rank = len(shape)
    _cached(site)
    operands = []
    for k in (0, 1):
        own = site.shape(k)
        contracted = len(own) - (1 if (k == 0) != transposed[k] else 2)
        free = 2 * len(own) - 3 - contracted
        offset = rank - len(own)
        place = {a: a + offset for a in range(len(own) - 2)} | {free: rank - 2 + k}
        marks = []
        for mark in site.marks(k):
            tied = site.tie(mark, [contracted], CONTRACTED) if contracted in mark.axes else mark
            if tied is not None:
                marks.append(Mark(tuple(place[a] for a in tied.axes), tied.labels))
                if any(place[a] < rank - 2 for a in tied.axes):
                    site.kind(tied.labels, "heads")
        sizes = [1] * rank  # the contracted axis is no longer there to disagree
        for axis, position in place.items():
            sizes[position] = own[axis]
        operands.append(Operand(k, tuple(sizes), tuple(marks), constant=False, offset=offset))
    site.emit(combine(site, _unshared(site, operands, rank), shape))


def _cached(site: Site) -> None:
    """A cache that is all there is, as in attention to an encoder, goes with the heads that read it."""
    for k, other in ((0, 1), (1, 0)):
        shape = site.shape(k)
        if site.marks(k) or len(shape) != len(site.shape(other)):
            continue
        for mark in site.marks(other):
            heads = [a for a in mark.axes if 0 < a < len(shape) - 2 and shape[a] == site.shape(other)[a] > 1]
            if len(heads) == 1 and is_input(site, k):
                tied = site.tie(mark, [a for a in mark.axes if a not in heads], CONTRACTED)
                why = adopt(site, k, tied, UNLABELLED) if tied is not None else ""
                site.freeze([tied] if tied is not None and why else [], why)


def _unshared(site: Site, operands: list[Operand], rank: int) -> list[Operand]:
    """Heads or features: where query heads share one value head, merging both into one axis would tie them all."""
    batched = any(min(m.axes) < rank - 2 for o in operands for m in o.marks)
    found = []
    for o in operands:
        shared = [m for m in o.marks if batched and m.axes == (rank - 1,)]
        for mark in shared:
            site.tie(mark, mark.axes, SHARED)
        found.append(replace(o, marks=tuple(m for m in o.marks if all(m is not s for s in shared))))
    return found
