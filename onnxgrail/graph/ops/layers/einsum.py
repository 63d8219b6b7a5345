"""Op rule of Einsum, a batched product written with letters."""

from __future__ import annotations

from onnxgrail.graph.ops.layers.contraction import CONTRACTED, contract, placed
from onnxgrail.graph.ops.rule import rule
from onnxgrail.graph.ops.tensors.broadcast import Operand, combine
from onnxgrail.graph.products import letters_of
from onnxgrail.graph.trace.flow import Site

FORM = "an Einsum with a repeated letter, or with a constant beside several operands, is not followed"


@rule("Einsum", since=12)
def einsum(site: Site) -> None:
    """Tie summed letters, and shared letters (heads) between operands; a constant operand consumes and produces."""
    terms, result = letters_of(str(site.attribute("equation")), [len(site.shape(k)) for k in site.operands])
    constants = [k for k in site.operands if site.is_constant(k)]
    plain = all(len(set(term)) == len(term) for term in (*terms, result))
    if not plain or (constants and len(site.operands) != 2) or not _agree(site, terms, constants):
        site.refuse(FORM)
    elif constants:
        site.emit(contract(site, constants[0], terms, result))
    else:
        operands = [_operand(site, k, terms, result) for k in site.operands]
        site.emit(combine(site, operands, site.out_shape()))


def _agree(site: Site, terms: list[str], constants: list[int]) -> bool:
    """Return True if the letters of a constant have the same size in all operands, so that nothing is broadcast."""
    sizes = [dict(zip(t, site.shape(k), strict=True)) for k, t in enumerate(terms)]
    return all(sizes[k][c] == other.get(c, sizes[k][c]) for k in constants for other in sizes for c in terms[k])


def _operand(site: Site, position: int, terms: list[str], result: str) -> Operand:
    """Return an operand on the axes of the result."""
    own = terms[position]
    shared = {c for k, term in enumerate(terms) if k != position for c in term}
    marks = []
    for mark in site.marks(position):
        summed = [a for a in mark.axes if own[a] not in result]
        tied = site.tie(mark, summed, CONTRACTED) if summed else mark
        if tied is not None:
            marks.append(placed(tied, own, result))
            if any(own[a] in shared for a in tied.axes):
                site.kind(tied.labels, "heads")
    shape = site.shape(position)
    sizes = tuple(shape[own.index(c)] if c in own else 1 for c in result)
    return Operand(position, sizes, tuple(marks), constant=False, offset=0)
