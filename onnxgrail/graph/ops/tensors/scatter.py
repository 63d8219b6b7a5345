"""Op rules that write into a tensor at indexed positions: axes that are not indexed pass.

Graph networks sum the messages of neighbors, so whole rows pass.  Exporters write an assignment to a slice with an
index over all axes; axes along which the index only counts positions pass too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools
from onnxgrail.graph.attributes import names_of
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.broadcast import Operand, combine
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.filled import is_filled, pick
from onnxgrail.graph.ops.tensors.pick import SCATTER
from onnxgrail.graph.stored.integers import kept
from onnxgrail.graph.trace.facts import Facts, constant_of
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

DATA, INDEX, UPDATES = 0, 1, 2


@rule("ScatterElements", "Scatter")
def scatter_elements(site: Site) -> None:
    """Pass axes that are not written along; tie data, updates and index, or narrow them too."""
    shape, varying = site.shape(DATA), site.flow.facts.varying
    written = {int(site.attribute("axis", 0)) % len(shape)}
    written |= {a for a, size in enumerate(site.shape(INDEX)) if size != shape[a]}
    written |= {a for k in (DATA, INDEX) for a in varying.get(site.name(k), ())}
    operands = [_operand(site, k, written) for k in (DATA, INDEX, UPDATES)]
    loose = [] if site.is_constant(INDEX) else [INDEX]
    site.emit(combine(site, operands, shape, filled=[*_filled(site), *loose]))


@rule("ScatterND")
def scatter_nd(site: Site) -> None:
    """Pass axes that are not indexed, or only counted; tie data and updates, or narrow them too."""
    numbered = site.shape(INDEX)[-1]
    written = set(range(numbered)) - counted(site.flow.facts, site.name(DATA), site.node.inputs[INDEX])
    offset = numbered - len(site.shape(INDEX)) + 1
    operands = [_operand(site, DATA, written), _operand(site, UPDATES, written, offset)]
    site.emit(combine(site, operands, site.shape(DATA), filled=_filled(site)))


def counted(facts: Facts, data: str, index: ir.Value | None) -> set[int]:
    """Return the axes of the data along which the index counts all positions, independently of the other axes."""
    (name,) = names_of([index])
    lines = facts.grids.get(name, ())
    if not lines or not _of_sizes(index, facts):
        return set()
    whole = {a for a, line in enumerate(lines) if np.array_equal(line, np.arange(facts.shapes[data][a]))}
    return whole - facts.varying.get(data, frozenset()) - facts.varying.get(name, frozenset())


def _of_sizes(value: ir.Value | None, facts: Facts) -> bool:
    """Return True if a value is computed from constants and shapes alone, independently of input values."""
    queue, seen = [value], set[str]()
    while queue:
        current = queue.pop()
        if current is None or current.name in facts.constants or current.name in seen:
            continue
        seen.add(current.name or "")
        node = current.producer()
        if node is None:
            return False
        queue += [] if node.op_type in ("Shape", "Size") else list(node.inputs)
    return True


def _operand(site: Site, k: int, written: Collection[int], offset: int = 0) -> Operand:
    """Return an operand on the data's axes, tied along the written axes."""
    own = [a for a in range(len(site.shape(k))) if a + offset < 0 or a + offset in written]
    tied = [site.tie(m, own, SCATTER) if set(own) & set(m.axes) else m for m in site.marks(k)]
    passing = tuple(Mark(tuple(a + offset for a in m.axes), m.labels) for m in tied if m is not None)
    return Operand(k, site.shape(DATA), passing, constant=site.is_constant(k), offset=offset)


def _filled(site: Site) -> list[int]:
    """Return the operands that are filled with one number."""
    return [k for k in (DATA, UPDATES) if not site.is_constant(k) and not site.marks(k) and is_filled(site, k)]


@narrow("ScatterElements", "Scatter", "ScatterND")
def narrow_scatter(cut: Cut) -> None:
    """Gather the kept positions from an operand without channels of its own."""
    rows = cut.node.op_type == "ScatterND"
    index = cut.shape(cut.input_name(INDEX))
    stays = cut.alive(cut.output_name())
    for k in (DATA, UPDATES) if rows else (DATA, INDEX, UPDATES):
        name = cut.input_name(k)
        if name in cut.facts.constants:
            continue
        own = cut.alive(name)
        offset = index[-1] - len(index) + 1 if rows and k == UPDATES else 0
        pick(cut, k, {a - offset: s for a, s in stays.items() if a - offset not in own})
    if rows:
        _recount(cut, {axis: alive for axis, alive in stays.items() if axis < index[-1]})


def _recount(cut: Cut, stays: Mapping[int, Bools]) -> None:
    """Shorten an index that counts positions to as many positions as are kept."""
    name = cut.input_name(INDEX)
    fewer = {axis: np.arange(len(alive)) < alive.sum() for axis, alive in stays.items()}
    if not fewer or name not in cut.facts.constants:
        pick(cut, INDEX, fewer)
        return
    index = constant_of(cut.node.inputs[INDEX], name, cut.facts)
    assert index is not None
    cut.set_operand(INDEX, kept(index, fewer), "index")
