"""Trace channels in one pass over the nodes, then make the kept sets rectangular and group them into blocks."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools, Ints, Refusal
from onnxgrail.graph import ops  # noqa: F401  registers the rules
from onnxgrail.graph.cost.repeated import in_bodies
from onnxgrail.graph.fittable.consumers import unmarked
from onnxgrail.graph.flatten.direct import settings
from onnxgrail.graph.flatten.inner import unseen
from onnxgrail.graph.flatten.states import seed, state_axes
from onnxgrail.graph.ops.layers.cache import settle
from onnxgrail.graph.ops.rule import find_rule
from onnxgrail.graph.rewrite.holdings import holdings_of
from onnxgrail.graph.stored.declared import freeze_undeclared
from onnxgrail.graph.stored.find import is_dequantised
from onnxgrail.graph.trace.blocks import group
from onnxgrail.graph.trace.facts import Facts, captures, key
from onnxgrail.graph.trace.flow import Flow, Site
from onnxgrail.graph.trace.labels import PIECES, Mark
from onnxgrail.graph.trace.lengths import DECIDES, deciding
from onnxgrail.graph.trace.modulated import modulated
from onnxgrail.graph.trace.sizes import SOURCES, sizes_of
from onnxgrail.graph.trace.survey import Survey

SIZES_AND_TYPES = frozenset({"Shape", "Size", "EyeLike", "CastLike"})  # read a tensor's shape or type, not its channels
BODY = -1  # operand number for values that a node's body reads


def trace(model: ir.Model, facts: Facts, *, interface: bool = False) -> Survey:
    """Find every set of channels that can be removed together, or the node that prevents it.

    Args:
        model: the graph; it is not changed.
        facts: concrete shapes and known values of its tensors.
        interface: key-value caches and states among the model's inputs and outputs may be narrowed.
    """
    flow = flow_of(model, facts, interface=interface)
    _box(flow)
    survey = group(flow, model)
    sizes = sizes_of(model, facts, survey.marks, _narrowings(survey))
    fitted = {slot.param for block in survey.blocks for slot in block.slots if slot.role != "passenger"}
    holdings = holdings_of(model, facts, survey.operands, fitted)
    operands = {**survey.operands, **unmarked(model, survey)}
    repeated = in_bodies(model, facts)
    return dataclasses.replace(survey, sizes=sizes, operands=operands, holdings=holdings, repeated=repeated)


def flow_of(
    model: ir.Model,
    facts: Facts,
    *,
    interface: bool = False,
    inside: bool = False,
    normed: Mapping[str, str] | None = None,
) -> Flow:
    """Follow the channels of a graph through all of its nodes.

    Args:
        model: the graph; it is not changed.
        facts: concrete shapes and known values of its tensors.
        interface: as for `trace`.
        inside: follow the channels of every head of its own, and record where products of two activations read them.
        normed: nodes of normalizations that channels pass, as in `Flow`.
    """
    axes, filters = state_axes(model, facts), modulated(model, facts)
    flow = Flow(facts, _aliases(model), interface, state_axes=axes, modulated=filters, tables={} if inside else None)
    flow.normed, flow.deciding = normed or {}, deciding(model, facts)
    if interface:
        seed(flow)
    for node in model.graph:
        if key(node) not in flow.normed:
            _visit(flow, model, node)
        elif flow.normed[key(node)] in flow.marks:
            flow.marks[key(node)] = flow.marks[flow.normed[key(node)]]
        flow.seen.add(key(node))
    settle(flow, model)
    _freeze_stray_weights(flow, model)
    _freeze_settings(flow, model)
    freeze_undeclared(flow, model)
    return flow


def _narrowings(survey: Survey) -> list[Bools]:
    """Return dead-unit masks of test graphs, chosen so that no size is right by chance in all of them.

    In the first three, all blocks lose units: neighbors different shares, none of them half; one unit; all but one (a
    quotient may be right for small shares alone).  In the others every second unit is removed (a part of a block may
    hold only one), in the blocks whose number has a certain bit set: of any two blocks, one loses units where the other
    does not.
    """
    shares = [max(1, ((2 + number % 3) * block.units) // 7) for number, block in enumerate(survey.blocks)]
    found = [[block.ids[:share] for block, share in zip(survey.blocks, shares, strict=True)]]
    found += [[block.ids[:1] for block in survey.blocks], [block.ids[1:] for block in survey.blocks]]
    for bit in range(len(survey.blocks).bit_length()):
        chosen = [block for number, block in enumerate(survey.blocks, start=1) if number >> bit & 1]
        found += [[block.ids[first::2] for block in chosen] for first in range(2)]
    return list(map(survey.dead, found))


def _aliases(model: ir.Model) -> dict[str, str]:
    """Return names of the same dequantized weight, alias -> name: tools dequantize it once per reader."""
    found: dict[str, str] = {}
    copies: dict[str, str] = {}
    for node in model.graph:
        if is_dequantised(node):
            attributes = sorted((name, str(a.value)) for name, a in node.attributes.items())
            first = copies.setdefault(str(([v and v.name for v in node.inputs], attributes)), key(node))
            if first != key(node):
                found[key(node)] = first
    return found


def _visit(flow: Flow, model: ir.Model, node: ir.Node) -> None:
    if all((v.name or "") in flow.facts.constants or not v.name for v in node.outputs):
        return
    version = model.opset_imports.get(node.domain, 1)
    site = Site(flow, node, version)
    function = find_rule(node.domain, node.op_type, version)
    marked = [m for k in site.operands for m in site.marks(k)]
    inner = [m for name in captures(node) for m in flow.marks.get(name, ())]
    if site.key in flow.deciding:
        site.freeze(marked, DECIDES)
    if inner:
        site.freeze(inner, f"the body of {node.op_type} reads it")
    names = [site.name(k) for k in site.operands] + [v.name for v in node.outputs if v.name]
    if any(name not in flow.facts.shapes for name in names):
        why = unseen(model, node, flow.facts) or site.why(f"{node.op_type} handles something else than plain tensors")
        for mark in marked:
            flow.labels.freeze(mark.labels.ravel(), why)
    elif function is None:
        site.freeze(marked, f"no rule for {node.domain or 'ai.onnx'} {node.op_type}-{version}")
    else:
        site.read.clear()
        function(site)
        unread = () if node.op_type in SIZES_AND_TYPES else [k for k in site.operands if k not in site.read]
        site.freeze(
            [m for k in unread for m in site.marks(k)], f"{node.op_type} reads them as something else than channels"
        )


def _freeze_stray_weights(flow: Flow, model: ir.Model) -> None:
    """Freeze weights that other nodes read as well: those readers would lose channels they need.

    A reader may follow the channels on one axis only: an embedding loses features, but no words.
    """
    claimed = {(use.node, use.operand, axis) for use in flow.uses for axis in use.mark.axes}
    readers: dict[str, list[tuple[ir.Node, int]]] = defaultdict(list)
    for node in model.graph:
        if key(node) in flow.aliases or node.op_type in SOURCES:
            continue
        names = [(v.name or "", k) for k, v in enumerate(node.inputs) if v is not None]
        for name, operand in [*names, *((name, BODY) for name in captures(node))]:
            readers[flow.aliases.get(name, name)].append((node, operand))
    outputs = {flow.aliases.get(v.name or "", v.name) for v in model.graph.outputs}
    for (name, axis), labels in flow.weight_labels.items():
        strays = ((n, k) for n, k in readers[name] if (key(n), k, axis) not in claimed)
        for node in [n for n, k in strays if not _idle(flow, n, k)][:1]:
            reason = f"the weight {name} is also read by {node.op_type} {node.name or key(node)}"
            flow.labels.freeze(labels, Refusal(value=name, node=node.name or key(node), op=node.op_type, reason=reason))
        if name in outputs:
            why = Refusal(value=name, node="", op="output", reason=f"the weight {name} is an output of the model")
            flow.labels.freeze(labels, why)


def _freeze_settings(flow: Flow, model: ir.Model) -> None:
    """Freeze inputs with a default value: callers may feed them, so they keep their shape."""
    made = {value.name or "": value.name or "" for value in settings(model)}
    for node in model.graph if made else ():
        source = next((made[v.name] for v in node.inputs if v is not None and v.name in made), None)
        if source is not None and key(node) in flow.facts.constants:
            made.update({v.name: source for v in node.outputs if v.name})
    for use in flow.uses:
        if use.value in made:
            reason = f"{made[use.value]} is an input of the model, with a default value"
            why = Refusal(value=use.value, node=made[use.value], op="input", reason=reason)
            flow.labels.freeze(use.mark.labels.ravel(), why)


def _idle(flow: Flow, node: ir.Node, operand: int) -> bool:
    """Return True if a weight is multiplied by zeros only, as in the first step of an unrolled cell."""
    if node.op_type not in ("MatMul", "Gemm") or operand not in (0, 1):
        return False
    other = node.inputs[1 - operand]
    value = flow.facts.values.get(other.name or "") if other is not None else None
    return value is not None and not value.any() and key(node) in flow.facts.constants


def _box(flow: Flow) -> None:
    """Make kept sets rectangular: where labels vary jointly over several axes, tie them along all but the longest.

    The kept part of a tensor is a product over its axes, so labels cannot depend on two axes together.
    """
    changed = True
    while changed:
        changed = False
        stays = np.array([0, *flow.labels.frozen()], dtype=np.int64)
        for name, marks in flow.marks.items():
            why = _boxed(name)
            normal = [flow.labels.normal(_permanent(flow, m, stays), why) for m in marks]
            flow.marks[name] = tuple(m for m in normal if m is not None)
            for mark in flow.marks[name]:
                changed |= _flatten(flow, mark, why)
        for position, use in enumerate(flow.uses):
            why = _boxed(use.value)
            joint = flow.labels.normal(_permanent(flow, use.mark, stays), why)
            if joint is not None and len(use.mark.axes) > 1:
                changed |= _flatten(flow, joint, why)
                flow.uses[position] = dataclasses.replace(use, mark=joint)


def _permanent(flow: Flow, mark: Mark, stays: Ints) -> Mark:
    """Return a mark of several axes with all frozen classes under label 0, so that it does not vary there."""
    if len(mark.axes) < 2:
        return mark
    found = flow.labels.find(mark.labels)
    return Mark(mark.axes, np.where(np.isin(found, stays), 0, found))


def _boxed(name: str) -> Refusal:
    reason = f"the channels of {name} {PIECES}"
    return Refusal(value=name, node=name, op="", reason=reason)


def _flatten(flow: Flow, mark: Mark, why: Refusal) -> bool:
    """Tie a joint mark along all axes but the longest; return True if labels changed."""
    if len(mark.axes) < 2:
        return False
    keep = max(mark.axes, key=lambda a: mark.labels.shape[mark.along(a)])
    before = flow.labels.find(mark.labels)
    flow.labels.tie(mark, [a for a in mark.axes if a != keep], why)
    return not np.array_equal(before, flow.labels.find(mark.labels))
