"""Writing into a tensor at numbered positions, as graph networks add up what neighbours send: whole rows pass."""

from __future__ import annotations

from collections.abc import Collection

from onnxgrail.graph.flow import Site
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.ops.broadcast import Operand, combine
from onnxgrail.graph.ops.cut import Cut
from onnxgrail.graph.ops.filled import is_filled, pick
from onnxgrail.graph.ops.pick import SCATTER
from onnxgrail.graph.ops.rule import narrow, rule

DATA, INDEX, UPDATES = 0, 1, 2


@rule("ScatterElements", "Scatter")
def scatter_elements(site: Site) -> None:
    """Axes that are not written along pass; data, updates and index are tied, or lose the same positions."""
    shape, varying = site.shape(DATA), site.flow.facts.varying
    written = {int(site.attribute("axis", 0)) % len(shape)}
    written |= {a for a, size in enumerate(site.shape(INDEX)) if size != shape[a]}
    written |= {a for k in (DATA, INDEX) for a in varying.get(site.name(k), ())}
    operands = [_operand(site, k, written) for k in (DATA, INDEX, UPDATES)]
    loose = [] if site.is_constant(INDEX) else [INDEX]
    site.emit(combine(site, operands, shape, filled=[*_filled(site), *loose]))


@rule("ScatterND")
def scatter_nd(site: Site) -> None:
    """Axes behind the numbered ones pass; data and updates are tied, or lose the same positions."""
    numbered = site.shape(INDEX)[-1]
    behind = numbered - len(site.shape(INDEX)) + 1
    operands = [_operand(site, DATA, range(numbered)), _operand(site, UPDATES, range(numbered), behind)]
    site.emit(combine(site, operands, site.shape(DATA), filled=_filled(site)))


def _operand(site: Site, k: int, written: Collection[int], offset: int = 0) -> Operand:
    """An operand in the data's coordinates; marks on axes that are written along are frozen."""
    placed = [Mark(tuple(a + offset for a in m.axes), m.labels) for m in site.marks(k)]
    stuck = [m for m in placed if any(a in written or a < 0 for a in m.axes)]
    site.freeze(stuck, SCATTER)
    passing = tuple(m for m in placed if all(m is not s for s in stuck))
    return Operand(k, site.shape(DATA), passing, constant=site.is_constant(k), offset=offset)


def _filled(site: Site) -> list[int]:
    """Operands of which any part will do."""
    return [k for k in (DATA, UPDATES) if not site.is_constant(k) and not site.marks(k) and is_filled(site, k)]


@narrow("ScatterElements", "Scatter", "ScatterND")
def narrow_scatter(cut: Cut) -> None:
    """Of an operand without channels of its own as many positions are taken as stay."""
    rows = cut.node.op_type == "ScatterND"
    index = cut.shape(cut.input_name(INDEX))
    for k in (DATA, UPDATES) if rows else (DATA, INDEX, UPDATES):
        name = cut.input_name(k)
        if name in cut.facts.constants:
            continue
        own = cut.alive(name)
        offset = index[-1] - len(index) + 1 if rows and k == UPDATES else 0
        pick(cut, k, {a - offset: s for a, s in cut.alive(cut.output_name()).items() if a - offset not in own})
