"""Einsum: a batched product in letters."""

from __future__ import annotations

from onnxgrail.graph.flow import Site
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.ops.broadcast import Operand, combine
from onnxgrail.graph.ops.linear import CONTRACTED
from onnxgrail.graph.ops.rule import rule


@rule("Einsum", since=12)
def einsum(site: Site) -> None:
    """Letters that are summed become one unit, letters that operands share (heads) are tied, others pass."""
    terms, result = _letters(str(site.attribute("equation")))
    usable = len(terms) == len(site.operands) and all(len(set(t)) == len(t) and "." not in t for t in (*terms, result))
    if not usable or any(site.is_constant(k) for k in site.operands):
        marks = [m for k in site.operands for m in site.marks(k)]
        site.freeze(marks, "this form of Einsum (ellipsis, repeated letter or constant operand) is left alone")
        return
    operands = [_operand(site, k, terms, result) for k in site.operands]
    site.emit(combine(site, operands, site.out_shape()))


def _letters(equation: str) -> tuple[list[str], str]:
    """Letters of every operand and of the result; without an arrow, those that occur once in alphabetical order."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    letters = left.replace(",", "")
    return left.split(","), right if arrow else "".join(sorted(c for c in set(letters) if letters.count(c) == 1))


def _operand(site: Site, position: int, terms: list[str], result: str) -> Operand:
    """An operand in the result's coordinates."""
    own = terms[position]
    shared = {c for k, term in enumerate(terms) if k != position for c in term}
    marks = []
    for mark in site.marks(position):
        summed = [a for a in mark.axes if own[a] not in result]
        tied = site.tie(mark, summed, CONTRACTED) if summed else mark
        if tied is not None:
            places = [result.index(own[a]) for a in tied.axes]
            order = sorted(range(len(places)), key=places.__getitem__)
            marks.append(Mark(tuple(sorted(places)), tied.labels.transpose(order)))
            if any(own[a] in shared for a in tied.axes):
                site.kind(tied.labels, "heads")
    shape = site.shape(position)
    sizes = tuple(shape[own.index(c)] if c in own else 1 for c in result)
    return Operand(position, sizes, tuple(marks), constant=False, offset=0)
