"""Op rules of MoE and QMoE: all experts of a layer in one node."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.ops.layers.contraction import contracted
from onnxgrail.graph.ops.layers.experts import CHOSEN
from onnxgrail.graph.ops.rule import rule
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark
from onnxgrail.graph.trace.mixture import INPUT, ROUTER, Matrix, Mixture, is_plain, mixture_of

LAYOUT = "its weights are computed at run time, or laid out or packed in a way that is not known"
RANKED = "it ranks the experts"
GIVEN = "it puts out as many channels as it reads, and those that it reads stay"


@rule("MoE", "QMoE", domain=MICROSOFT)
def mixture(site: Site) -> None:
    """Remove hidden channels from all experts alike; tie input and output as one stream; experts stay."""
    form = mixture_of(site.node)
    last = len(site.shape(INPUT)) - 1
    marks = site.marks(INPUT)
    site.freeze(site.marks(ROUTER), RANKED)
    site.freeze([m for m in marks if last not in m.axes], CHOSEN)
    fused = _fused(site, form)
    if not fused:
        site.freeze(marks, LAYOUT)
        return
    gated = bool(site.name(form.gate.weight))
    fed = [site.collapse(m, last) for m in marks if last in m.axes]
    for stack in (form.up, *([form.gate] if gated else [])):
        contracted(site, stack.weight, 2, last, fed)
    made, inner = site.weight(form.down.weight, 1), site.weight(form.down.weight, 2)
    for found in fed:
        site.union(found, made)
    if not fed:
        site.freeze([Mark((1,), made)], GIVEN)
    site.carry(form.down.weight, Mark((1,), made), "producer")
    _bias(site, form.down, made)
    _hidden(site, form.up, np.repeat(inner, fused) if form.interleaved else np.tile(inner, fused))
    if gated:
        _hidden(site, form.gate, inner)
    inside = (site.key, site.name(ROUTER))
    site.carry(form.down.weight, Mark((2,), inner), "consumer", (site.name(INPUT), last), inside)
    site.emit([Mark((last,), made)])


def _fused(site: Site, form: Mixture) -> int:
    """Return how many rows of the first stack produce one hidden channel; 0 if the layout is not known."""
    stacks = [m for m in (form.up, form.down, form.gate) if site.name(m.weight)]
    operands = [k for m in stacks for k in (m.weight, m.scale, m.bias, m.zero) if k >= 0 and site.name(k)]
    if not is_plain(site.node) or not all(site.is_constant(k) for k in operands):
        return 0
    if site.node.op_type == "QMoE" and not all(site.source(m.weight) in site.flow.facts.stored for m in stacks):
        return 0
    shapes = [site.shape(m.weight) for m in stacks]
    if any(len(shape) != 3 for shape in shapes):
        return 0
    width, (experts, made, inner) = site.shape(INPUT)[-1], shapes[1]
    rows = shapes[0][1]
    known = shapes[0] == (experts, rows, width) and made == width and shapes[2:] in ([], [(experts, inner, width)])
    fused = rows // inner if inner and rows in (inner, 2 * inner) else 0
    told = fused < 2 or int(site.attribute("swiglu_fusion", 0)) in (1, 2)
    return fused if known and told else 0


def _hidden(site: Site, stack: Matrix, labels: Ints) -> None:
    """Produce the hidden channels by a stack."""
    rows = site.weight(stack.weight, 1)
    site.union(rows, labels)
    site.carry(stack.weight, Mark((1,), rows), "producer")
    _bias(site, stack, rows)


def _bias(site: Site, stack: Matrix, rows: Ints) -> None:
    if site.name(stack.bias):
        site.carry(stack.bias, Mark((1,), rows))
