"""Key-value caches: model inputs that are joined with heads, and model outputs that return heads.

A cache is part of the interface, so its heads stay unless the user allows narrowing the interface (`Flow.interface`).
Caches are recognized by the graph, not by names: an input that is concatenated with heads or is the past of a fused
attention, and an output that returns heads as their projections computed them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Refusal
from onnxgrail.graph.flatten.states import STATE, STAYS, hands_on
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.flow import Flow, Site
from onnxgrail.graph.trace.labels import Mark

CACHE = "its key-value cache is an input/output of the model; --kv-io narrows the interface too"
READ = "its key-value cache is also read by {}, before its heads are known"
OUTPUT = "it is an output of the model"
RANKS = (4, 5)  # (batch, heads, length, size) or (batch, length, heads, size), with or without a leading key/value axis
SIZES = frozenset({"Shape", "Size"})
PRESENT = {"Attention": (1, 2), "MultiHeadAttention": (1, 2), "GroupQueryAttention": (1, 2)}


def adopt(site: Site, operand: int, mark: Mark, otherwise: str) -> str:
    """Give an unmarked model input the labels of the heads that it is joined with.

    Args:
        site: the node that joins them.
        operand: position of the input.
        mark: labels of the heads.
        otherwise: the reason to return if the operand is not a cache.

    Returns:
        '' if done, else the reason why not.
    """
    copies = chain(site, operand)
    if copies is not None and not site.flow.interface and copies[-1].name in site.flow.state_axes:
        return STATE
    last = len(site.shape(operand)) - 1
    if copies is None or last + 1 not in RANKS or not set(mark.axes) & set(range(1, last)):
        return otherwise
    if not site.flow.interface:
        return CACHE
    own = {site.key, *(key(v.producer()) for v in copies if v.producer() is not None)}  # type: ignore[arg-type]
    marks: list[tuple[str, Mark]] = []
    for value in copies:
        early = [n for n in value.consumers() if key(n) in site.flow.seen - own and n.op_type not in SIZES]
        if early:
            return READ.format(f"{early[0].op_type} {early[0].name or key(early[0])}")
        marks.append((value.name or "", mark))
        mark = _before(value.producer(), mark)
    for name, found in marks:
        site.flow.marks[name] = (found,)
    return ""


def past(site: Site, operand: int, axis: int, heads: np.ndarray, otherwise: str) -> str:
    """Tie a cache operand of a fused attention to the heads; return '' if done, else the reason why not."""
    if not site.name(operand):
        return ""
    mark = Mark((axis,), heads)
    if site.is_constant(operand):
        site.carry(operand, mark)
        return ""
    own = site.marks(operand)
    along = [m for m in own if axis in m.axes]
    site.freeze([m for m in own if axis not in m.axes and m.axes != (0,)], otherwise)
    for found in along:
        site.union(site.collapse(found, axis), heads)
    return "" if along else adopt(site, operand, mark, otherwise)


def present(site: Site, output: int) -> str:
    """Return why a cache output of a fused attention keeps its heads; '' if it may lose some."""
    outputs = site.node.outputs
    leaves = output < len(outputs) and outputs[output].is_graph_output()
    return CACHE if leaves and not site.flow.interface else ""


def settle(flow: Flow, model: ir.Model) -> None:
    """Freeze channels of model inputs and outputs, except caches and states of an interface that may be narrowed."""
    shapes = flow.facts.shapes
    of_states = {shapes[name] for name in flow.state_axes}
    handed, stays = set(), STAYS if flow.interface else STATE
    for output in model.graph.outputs:
        name = output.name or ""
        marks = flow.marks.get(name, ())
        cache = bool(marks) and _holds_heads(flow, marks, output) and not _attended(flow, output)
        state = bool(marks) and flow.interface and hands_on(flow, marks, shapes[name])
        if state:
            handed.add(shapes[name])
        if marks and not (state or (cache and flow.interface)):
            _keep(flow, marks, output, CACHE if cache else stays if shapes[name] in of_states else OUTPUT)
    for value in model.graph.inputs:
        name = value.name or ""
        marks = flow.marks.get(name, ())
        if marks and not (_holds_heads(flow, marks, value) or (name in flow.states and shapes[name] in handed)):
            _keep(flow, marks, value, "it is an input of the model")


def chain(site: Site, operand: int) -> list[ir.Value] | None:
    """Return the values from an operand back to the model input that it copies; None if it is computed."""
    value = site.node.inputs[operand]
    found: list[ir.Value] = []
    while value is not None:
        found.append(value)
        node = value.producer()
        if node is None:
            named = value.is_graph_input() and value.name not in site.flow.facts.constants
            return found if named and site.flow.facts.dtypes[value.name or ""].kind not in "iub" else None
        copies = node.op_type in ("Identity", "Cast", "Transpose") or (
            node.op_type == "Concat" and len(node.inputs) == 1
        )
        value = node.inputs[0] if copies and not node.domain else None
    return None


def _before(node: ir.Node | None, mark: Mark) -> Mark:
    """Return the mark of a copy on the axes of the input of the node that made the copy."""
    if node is None or node.op_type != "Transpose" or "perm" not in node.attributes:
        return mark
    order = node.attributes["perm"].as_ints()
    return mark.moved([order[a] for a in mark.axes])


def _holds_heads(flow: Flow, marks: Iterable[Mark], value: ir.Value) -> bool:
    """Return True if all removable parts of a tensor are whole heads on an axis of their own."""
    shape = flow.facts.shapes[value.name or ""]
    why = _why(value, OUTPUT)
    found = [n for n in (flow.labels.normal(m, why) for m in marks) if n is not None]
    if len(shape) not in RANKS or any(len(m.axes) != 1 or m.axes[0] in (0, len(shape) - 1) for m in found):
        return False
    heads = {r for labels, kind in flow.kinds if kind == "heads" for r in np.unique(flow.labels.find(labels)).tolist()}
    return all(set(flow.labels.find(m.labels).ravel().tolist()) <= heads | {0} for m in found)


def _attended(flow: Flow, output: ir.Value) -> bool:
    """Return True if attention scores or results reach an output without a weight in between."""
    queue, seen = [output], set[str]()
    while queue:
        value = queue.pop()
        node = value.producer()
        if node is None or value.name in seen:
            continue
        seen.add(value.name or "")
        if node.op_type in PRESENT and value.index() in PRESENT[node.op_type]:
            continue
        marked = [v for v in node.inputs if v is not None and v.name in flow.marks]
        constant = [v for v in node.inputs if v is not None and v.name in flow.facts.constants]
        linear = node.op_type in ("MatMul", "FusedMatMul", "Gemm", "Conv")
        if node.op_type in (*PRESENT, "Softmax", "Einsum") or (linear and not constant):
            return True
        queue += [] if linear else marked
    return False


def _keep(flow: Flow, marks: Iterable[Mark], value: ir.Value, reason: str) -> None:
    for mark in marks:
        flow.labels.freeze(mark.labels.ravel(), _why(value, reason))


def _why(value: ir.Value, reason: str) -> Refusal:
    name = value.name or ""
    return Refusal(value=name, node=name, op="output" if value.is_graph_output() else "input", reason=reason)
