"""Op rules of MatMul and Gemm: a constant matrix consumes the last axis and produces a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxgrail.graph.ops.layers.cache import adopt, chain
from onnxgrail.graph.ops.layers.contraction import (
    BIAS,
    CONTRACTED,
    FIXED,
    contract,
    contracted,
    order_of,
    product_letters,
)
from onnxgrail.graph.ops.layers.experts import CHOSEN, chosen, consume
from onnxgrail.graph.ops.layers.inside import inside, is_inside
from onnxgrail.graph.ops.rule import rule
from onnxgrail.graph.ops.tensors.broadcast import UNLABELLED, Operand, combine, operand
from onnxgrail.graph.ops.tensors.layout import permuted
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

SHARED = "it is one value head that several query heads read; it stays, query heads can go"
VECTOR = "it multiplies with a vector, not a matrix, that is computed at run time"
COMPUTED = "its weight is computed at run time"


@dataclass(frozen=True, slots=True)
class Form:
    """The layout of a product's two operands.

    Attributes:
        transposed: per operand, True if its last two axes are swapped (after the move).
        moved: per operand, True if its first axis was moved after the batch axes.
    """

    transposed: tuple[bool, bool] = (False, False)
    moved: tuple[bool, bool] = (False, False)


PLAIN = Form()


@rule("MatMul")
def matmul(site: Site) -> None:
    """Consume and produce by a constant matrix, stack of matrices or left matrix; tie two activations (heads)."""
    constant = [site.is_constant(k) for k in (0, 1)]
    ranks = [len(site.shape(k)) for k in (0, 1)]
    if constant == [False, True] and ranks[1] == 2:
        linear(site, inward=0, outward=1)
    elif any(constant):
        stacked(site)
    elif min(ranks) >= 2:
        product(site)
    else:
        site.freeze([*site.marks(0), *site.marks(1)], VECTOR)


@rule("Gemm")
def gemm(site: Site) -> None:
    """Consume one axis and produce another by a constant matrix; cut the bias with the outputs."""
    turned = [bool(site.attribute(name, 0)) for name in ("transA", "transB")]
    if site.is_constant(1) and not turned[0]:
        linear(site, inward=int(turned[1]), outward=int(not turned[1]), bias=2)
    elif site.is_constant(0) != site.is_constant(1):
        shape = site.out_shape()
        marks = _letters(site, Form((turned[0], turned[1])))
        own = Operand(0, shape, tuple(marks), constant=False, offset=0)
        site.emit(combine(site, [own, *(operand(site, 2, 2) for _ in range(bool(site.name(2))))], shape))
    else:
        site.refuse(COMPUTED)


def stacked(site: Site, *, form: Form = PLAIN) -> None:
    """Pass a product with one constant operand: a stack of matrices, a left matrix or a vector."""
    site.emit(_letters(site, form))


def _letters(site: Site, form: Form) -> list[Mark]:
    terms, result = product_letters([site.shape(k) for k in (0, 1)], form.transposed, form.moved)
    return contract(site, 0 if site.is_constant(0) else 1, terms, result)


def linear(site: Site, *, inward: int, outward: int, bias: int | None = None, transposed: bool = False) -> None:
    """Consume the last axis of the first input by a matrix, the second input, and produce a new last axis.

    Args:
        site: the node.
        inward: axis of the matrix that meets the activation.
        outward: axis of the matrix that is produced.
        bias: position of a bias, which is cut with the outputs.
        transposed: consume the second-last axis of the activation instead.
    """
    rank = len(site.out_shape())
    last = len(site.shape(0)) - (2 if transposed else 1)
    marks = site.marks(0)
    contracted(site, 1, inward, last, (site.collapse(m, last) for m in marks if last in m.axes))
    produced = site.weight(1, outward)
    site.carry(1, Mark((outward,), produced), "producer")
    if bias is not None and site.name(bias) and site.shape(bias)[-1:] not in ((), (1,)):  # one number stays
        site.passenger(bias, produced, BIAS, axis=len(site.shape(bias)) - 1, whole=True)
    passing = [m for m in marks if last not in m.axes]
    if transposed:
        passing = [Mark(tuple(a - (a == rank - 1) for a in m.axes), m.labels) for m in passing]
    site.emit([*passing, Mark((rank - 1,), produced)])


def product(site: Site, *, form: Form = PLAIN) -> None:
    """Pass a product of two activations: tie the contracted axis, and batch axes (heads) between the operands.

    A matrix gathered from a stack of experts is a weight: it consumes the contracted axis.
    """
    if not any(form.moved) and is_inside(site):
        inside(site)
        return
    shape = site.out_shape()
    rank = len(shape)
    if not any(form.moved):
        _cached(site)
    sides = [_side(site, k, form) for k in (0, 1)]
    passing = _fed(site, sides) or [_tied(site, side) for side in sides]
    operands = []
    for k, (side, marks) in enumerate(zip(sides, passing, strict=True)):
        offset = rank - len(side.shape)
        place = {a: a + offset for a in range(len(side.shape) - 2)} | {side.free: rank - 2 + k}
        placed = [m.moved([place[a] for a in m.axes]) for m in marks]
        for mark in placed:
            if min(mark.axes) < rank - 2:
                site.kind(mark.labels, "heads")
        sizes = [1] * rank  # the contracted axis is not in the output
        for axis, position in place.items():
            sizes[position] = side.shape[axis]
        operands.append(Operand(k, tuple(sizes), tuple(placed), constant=False, offset=offset))
    site.emit(combine(site, _unshared(site, operands, rank), shape))


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """An operand of a product with its axes in the order of the product; `order` holds their original positions."""

    operand: int
    order: list[int]
    shape: tuple[int, ...]
    marks: list[Mark]
    contracted: int
    free: int


def _side(site: Site, k: int, form: Form) -> _Side:
    own = len(site.shape(k))
    order = order_of(own, moved=form.moved[k])
    shape = tuple(site.shape(k)[a] for a in order)
    contracted = own - (1 if (k == 0) != form.transposed[k] else 2)
    return _Side(k, order, shape, [permuted(m, order) for m in site.marks(k)], contracted, 2 * own - 3 - contracted)


def _tied(site: Site, side: _Side) -> list[Mark]:
    """Return an operand's marks after tying the contracted axis."""
    tied = [site.tie(m, [side.contracted], CONTRACTED) if side.contracted in m.axes else m for m in side.marks]
    return [m for m in tied if m is not None]


def _fed(site: Site, sides: Sequence[_Side]) -> list[list[Mark]] | None:
    """Consume one operand by the other if that was gathered from a stack; return the passing marks, None otherwise."""
    stacks = [chosen(site, k) for k in (0, 1)]
    weight = next((side for side, found in zip(sides, stacks, strict=True) if found is not None), None)
    found = stacks[weight.operand] if weight is not None else None
    if weight is None or found is None or all(stacks):
        return None
    fed = sides[1 - weight.operand]
    axis = found.axes[weight.order[weight.contracted]]
    own, read = ([m for m in side.marks if side.contracted in m.axes] for side in (weight, fed))
    if axis is None or not own or any(len(m.axes) > 1 for m in (*own, *read)):
        return None
    if read:
        site.union(own[0].labels, read[0].labels)
    else:
        site.freeze(own, FIXED)
    consume(site, found, axis, (site.name(fed.operand), fed.order[fed.contracted]))
    for side in sides:
        site.freeze([m for m in side.marks if m not in own + read and m.axes != (side.free,)], CHOSEN)
    return [[m for m in side.marks if m.axes == (side.free,)] for side in sides]


def _cached(site: Site) -> None:
    """Tie a cache that is used alone, as in attention to an encoder, to the heads that read it."""
    for k, other in ((0, 1), (1, 0)):
        shape = site.shape(k)
        if site.marks(k) or len(shape) != len(site.shape(other)):
            continue
        for mark in site.marks(other):
            heads = [a for a in mark.axes if 0 < a < len(shape) - 2 and shape[a] == site.shape(other)[a] > 1]
            if len(heads) == 1 and chain(site, k) is not None:
                tied = site.tie(mark, [a for a in mark.axes if a not in heads], CONTRACTED)
                why = adopt(site, k, tied, UNLABELLED) if tied is not None else ""
                site.freeze([tied] if tied is not None and why else [], why)


def _unshared(site: Site, operands: list[Operand], rank: int) -> list[Operand]:
    """Freeze the features of a value head that several query heads share: merging axes would tie all query heads."""
    batched = any(min(m.axes) < rank - 2 for o in operands for m in o.marks)
    found = []
    for o in operands:
        shared = [m for m in o.marks if batched and m.axes == (rank - 1,)]
        for mark in shared:
            site.tie(mark, mark.axes, SHARED)
        found.append(replace(o, marks=tuple(m for m in o.marks if all(m is not s for s in shared))))
    return found
