"""Einsum: a batched product in letters."""

from __future__ import annotations

from onnxgrail.core import Ints
from onnxgrail.graph.flow import Site
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.ops.broadcast import Operand, combine
from onnxgrail.graph.ops.linear import CONTRACTED, FIXED
from onnxgrail.graph.ops.rule import rule

FORM = "an Einsum with a repeated letter, or with a constant beside several operands, is not followed"


@rule("Einsum", since=12)
def einsum(site: Site) -> None:
    """Summed letters become one unit, shared letters (heads) are tied; a constant operand consumes and produces."""
    terms, result = _letters(site)
    constants = [k for k in site.operands if site.is_constant(k)]
    plain = all(len(set(term)) == len(term) for term in (*terms, result))
    if not plain or (constants and len(site.operands) != 2) or not _agree(site, terms, constants):
        site.refuse(FORM)
    elif constants:
        _linear(site, constants[0], terms, result)
    else:
        operands = [_operand(site, k, terms, result) for k in site.operands]
        site.emit(combine(site, operands, site.out_shape()))


def _letters(site: Site) -> tuple[list[str], str]:
    """A letter for every axis of every operand and of the result.

    An ellipsis stands for letters of its own; without an arrow, the result has these and then the letters that occur
    once in alphabetical order.
    """
    left, arrow, right = str(site.attribute("equation")).replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [len(site.shape(k)) - len(t.replace("...", "")) if "..." in t else 0 for k, t in enumerate(terms)]
    unused = "".join(chr(code) for code in range(0x3B1, 0x3B1 + max(hidden)))
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    spelled = [t.replace("...", unused[len(unused) - n :]) for t, n in zip(terms, hidden, strict=True)]
    return spelled, right.replace("...", unused)


def _agree(site: Site, terms: list[str], constants: list[int]) -> bool:
    """Whether the letters of a constant have the same size wherever they stand, so that nothing is broadcast."""
    sizes = [dict(zip(t, site.shape(k), strict=True)) for k, t in enumerate(terms)]
    return all(sizes[k][c] == other.get(c, sizes[k][c]) for k in constants for other in sizes for c in terms[k])


def _linear(site: Site, w: int, terms: list[str], result: str) -> None:
    """A constant beside an activation: letters that vanish are consumed, letters of its own are produced."""
    x = 1 - w
    inner, weight = terms[x], terms[w]
    marks = [_narrowest(site, m, inner, weight, result) for m in site.marks(x)]
    fed = {inner[m.axes[0]]: m.labels for m in marks if len(m.axes) == 1}
    stuck = [m for m in marks if any(inner[a] not in result and inner[a] not in weight for a in m.axes)]
    site.freeze(stuck, CONTRACTED)
    passing = [_placed(m, inner, result) for m in marks if all(inner[a] in result for a in m.axes)]
    for axis, letter in enumerate(weight):
        if letter in inner and letter in result:
            if letter in fed:
                site.carry(w, Mark((axis,), fed[letter]))
        elif letter in inner:
            _consume(site, w, axis, (site.name(x), inner.index(letter)), fed.get(letter))
        elif letter in result:
            produced = site.weight(w, axis)
            site.carry(w, Mark((axis,), produced), "producer")
            passing.append(Mark((result.index(letter),), produced))
    site.emit(passing)


def _narrowest(site: Site, mark: Mark, inner: str, weight: str, result: str) -> Mark:
    """A mark on one axis where it meets the constant or is summed."""
    met = [a for a in mark.axes if inner[a] in weight] + [a for a in mark.axes if inner[a] not in result]
    return Mark((met[0],), site.collapse(mark, met[0])) if met else mark


def _consume(site: Site, w: int, axis: int, source: tuple[str, int], fed: Ints | None) -> None:
    consumed = site.weight(w, axis)
    if fed is None:
        site.freeze([Mark((axis,), consumed)], FIXED)
    else:
        site.union(fed, consumed)
    site.carry(w, Mark((axis,), consumed), "consumer", source)


def _placed(mark: Mark, own: str, result: str) -> Mark:
    """A mark in the result's coordinates."""
    places = [result.index(own[a]) for a in mark.axes]
    order = sorted(range(len(places)), key=places.__getitem__)
    return Mark(tuple(sorted(places)), mark.labels.transpose(order))


def _operand(site: Site, position: int, terms: list[str], result: str) -> Operand:
    """An operand in the result's coordinates."""
    own = terms[position]
    shared = {c for k, term in enumerate(terms) if k != position for c in term}
    marks = []
    for mark in site.marks(position):
        summed = [a for a in mark.axes if own[a] not in result]
        tied = site.tie(mark, summed, CONTRACTED) if summed else mark
        if tied is not None:
            marks.append(_placed(tied, own, result))
            if any(own[a] in shared for a in tied.axes):
                site.kind(tied.labels, "heads")
    shape = site.shape(position)
    sizes = tuple(shape[own.index(c)] if c in own else 1 for c in result)
    return Operand(position, sizes, tuple(marks), constant=False, offset=0)
