"""Products of a constant and an activation, with a letter per axis: Einsum, stacked matrices, matrices on the left.

Summed letters are consumed, letters of the constant alone are produced, letters of both operands pass: a constant with
a matrix per head or per ensemble member is cut along these axes too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxgrail.core import Ints
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

BIAS = "its bias is computed at run time"
FIXED = "the tensor it reads has a width that stays"
CONTRACTED = "it is summed over in a product of two activations, none of them a weight"


def contract(site: Site, w: int, terms: Sequence[str], result: str) -> list[Mark]:
    """Return the marks of the product; `w` is the position of the constant operand."""
    x = 1 - w
    inner, weight = terms[x], terms[w]
    marks = [_narrowest(site, m, inner, weight, result) for m in site.marks(x)]
    fed = {inner[m.axes[0]]: m.labels for m in marks if len(m.axes) == 1}
    stuck = [m for m in marks if any(inner[a] not in result and inner[a] not in weight for a in m.axes)]
    site.freeze(stuck, CONTRACTED)
    passing = [placed(m, inner, result) for m in marks if all(inner[a] in result for a in m.axes)]
    for axis, letter in enumerate(weight):
        if letter in inner and letter in result:
            if letter in fed:
                site.carry(w, Mark((axis,), fed[letter]))
        elif letter in inner:
            contracted(site, w, axis, inner.index(letter), [fed[letter]] if letter in fed else ())
        elif letter in result:
            produced = site.weight(w, axis)
            site.carry(w, Mark((axis,), produced), "producer")
            passing.append(Mark((result.index(letter),), produced))
    return passing


def product_letters(
    shapes: Sequence[tuple[int, ...]], turned: Sequence[bool], moved: Sequence[bool]
) -> tuple[list[str], str]:
    """Return the letters of a batched matrix product: k is contracted, m and n stay, others are batch axes.

    A broadcast axis of size 1 gets a letter that the result lacks.

    Args:
        shapes: of the two operands.
        turned: per operand, True if its last two axes are swapped.
        moved: per operand, True if its first axis was moved before its last one (before the swap).

    Returns:
        The letters of both operands, and of the result.
    """
    orders = [order_of(len(s), moved=m) for s, m in zip(shapes, moved, strict=True)]
    counted = [tuple(s[a] for a in order)[:-2] for s, order in zip(shapes, orders, strict=True)]
    longest = max(len(c) for c in counted)
    batch = [chr(0x391 + 2 * place) for place in range(longest)]
    aligned = [(1,) * (longest - len(c)) + c for c in counted]
    terms = []
    for k, (own, other) in enumerate((aligned, aligned[::-1])):
        letters = [chr(ord(c) + (a == 1 < b)) for c, a, b in zip(batch, own, other, strict=True)]
        ends = "k" if len(shapes[k]) == 1 else ("mk", "kn")[k]
        spelled = [*letters[longest - len(counted[k]) :], *(ends[::-1] if turned[k] else ends)]
        terms.append("".join(spelled[orders[k].index(axis)] for axis in range(len(spelled))))
    return terms, "".join(batch) + "m" * (len(shapes[0]) > 1) + "n" * (len(shapes[1]) > 1)


def order_of(rank: int, *, moved: bool) -> list[int]:
    """Return the axes in the order of the product: batch axes, then the two matrix axes."""
    return [*range(1, rank - 1), 0, rank - 1] if moved else list(range(rank))


def placed(mark: Mark, own: str, result: str) -> Mark:
    """Return a mark on the axes of the result."""
    return mark.moved([result.index(own[a]) for a in mark.axes])


def _narrowest(site: Site, mark: Mark, inner: str, weight: str, result: str) -> Mark:
    """Reduce a mark to one axis if that axis is in the constant or is summed."""
    met = [a for a in mark.axes if inner[a] in weight] + [a for a in mark.axes if inner[a] not in result]
    return Mark((met[0],), site.collapse(mark, met[0])) if met else mark


def contracted(site: Site, w: int, axis: int, along: int, fed: Iterable[Ints]) -> Ints:
    """Consume channels by an axis of a weight, which stays if the other operand has none; return the axis's labels.

    Args:
        site: the node.
        w: position of the weight.
        axis: of the weight.
        along: the axis of the other operand that it meets: of the first input, or of the second if the weight is first.
        fed: labels on that axis.
    """
    consumed, found = site.weight(w, axis), False
    for labels in fed:
        site.union(labels, consumed)
        found = True
    if not found:
        site.freeze([Mark((axis,), consumed)], FIXED)
    site.carry(w, Mark((axis,), consumed), "consumer", (site.name(int(w == 0)), along))
    return consumed
