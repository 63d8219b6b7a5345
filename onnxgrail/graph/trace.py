"""The channel tracer: one pass over the nodes in order, then what is left over is made rectangular and grouped into blocks."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.core import Refusal
from onnxgrail.graph import ops  # noqa: F401  registers the rules
from onnxgrail.graph.blocks import group
from onnxgrail.graph.facts import Facts, captures, key
from onnxgrail.graph.flow import Flow, Site, Use
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.ops.rule import find_rule
from onnxgrail.graph.survey import Survey


def trace(model: ir.Model, facts: Facts) -> Survey:
    """Find every set of channels that can be removed together, or the node that stands in the way.

    Args:
        model: the graph; it is not changed.
        facts: concrete shapes and known values of its tensors.
    """
    flow = Flow(facts, _aliases(model))
    for node in model.graph:
        _visit(flow, model, node)
    for output in model.graph.outputs:
        why = Refusal(value=output.name or "", node="", op="output", reason="it is an output of the model")
        for mark in flow.marks.get(output.name or "", ()):
            flow.labels.freeze(mark.labels.ravel(), why)
    _freeze_stray_weights(flow, model)
    _box(flow)
    return group(flow, model)


def _aliases(model: ir.Model) -> dict[str, str]:
    """Names that Identity nodes give to initializers (the legacy exporter's way to tie and to deduplicate)."""
    found: dict[str, str] = {}
    for node in model.graph:
        source = node.inputs[0].name if node.inputs and node.inputs[0] is not None else None
        if node.op_type == "Identity" and source and (source in model.graph.initializers or source in found):
            found[key(node)] = found.get(source, source)
    return found


def _visit(flow: Flow, model: ir.Model, node: ir.Node) -> None:
    if all((v.name or "") in flow.facts.constants or not v.name for v in node.outputs):
        return
    version = model.opset_imports.get(node.domain, 1)
    site = Site(flow, node, version)
    function = find_rule(node.domain, node.op_type, version)
    marked = [m for k in site.operands for m in site.marks(k)]
    inner = [m for name in captures(node) for m in flow.marks.get(name, ())]
    if inner:
        site.freeze(inner, f"the body of {node.op_type} reads it")
    if any(site.out_name(k) not in flow.facts.shapes for k in range(len(node.outputs)) if site.out_name(k)):
        site.freeze(marked, f"{node.op_type} does not put out a plain tensor")
    elif function is None:
        site.freeze(marked, f"no rule for {node.domain or 'ai.onnx'} {node.op_type}-{version}")
    else:
        function(site)


def _freeze_stray_weights(flow: Flow, model: ir.Model) -> None:
    """A weight that something else reads too cannot be cut: that reader would lose channels it needs."""
    claimed: dict[str, set[tuple[str, int]]] = {}
    for use in flow.uses:
        claimed.setdefault(use.value, set()).add((use.node, use.operand))
    weights = {name for name, _ in flow.weight_labels}
    readers: list[tuple[str, ir.Node]] = []
    for node in model.graph:
        for position, value in enumerate(node.inputs):
            name = "" if value is None else value.name or ""
            source = flow.aliases.get(name, name)
            if source in weights and (key(node), position) not in claimed.get(source, set()):
                if not (node.op_type == "Identity" and key(node) in flow.aliases):
                    readers.append((source, node))
        readers += [(flow.aliases.get(n, n), node) for n in captures(node) if flow.aliases.get(n, n) in weights]
    outputs = {v.name for v in model.graph.outputs}
    for (name, axis), labels in flow.weight_labels.items():
        for source, node in readers:
            if source == name:
                reason = f"the weight {name} is also read by {node.op_type} {node.name or key(node)}"
                flow.labels.freeze(labels, Refusal(value=name, node=node.name or key(node), op=node.op_type, reason=reason))
        if name in outputs:
            why = Refusal(value=name, node="", op="output", reason=f"the weight {name} is an output of the model (axis {axis})")
            flow.labels.freeze(labels, why)


def _box(flow: Flow) -> None:
    """Make every tensor stay a box: where labels vary over two axes jointly, keep the axis with more units.

    A kept set of a tensor is a product over its axes, so labels that need both axes to be told apart are tied along one.
    """
    why = Refusal(value="", node="", op="", reason="channels of one tensor would no longer form a box")
    changed = True
    while changed:
        changed = False
        for name, marks in flow.marks.items():
            normal = [flow.labels.normal(m, why) for m in marks]
            flow.marks[name] = tuple(m for m in normal if m is not None)
            for mark in flow.marks[name]:
                changed |= _flatten(flow, mark, why)
        for position, use in enumerate(flow.uses):
            mark = flow.labels.normal(use.mark, why)
            if mark is not None and len(use.mark.axes) > 1:
                changed |= _flatten(flow, mark, why)
                flow.uses[position] = Use(use.node, use.operand, use.value, mark, use.role, use.source)


def _flatten(flow: Flow, mark: Mark, why: Refusal) -> bool:
    """Tie a joint mark along all axes but one; whether there was something to do."""
    if len(mark.axes) < 2:
        return False
    keep = max(mark.axes, key=lambda a: mark.labels.shape[mark.along(a)])
    flow.labels.tie(mark, [a for a in mark.axes if a != keep], why)
    return True
