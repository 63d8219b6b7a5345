"""Streamed states: model inputs that a step reads, with outputs that return their next value.

The state of a recurrent layer has the layer's hidden units on its last axis, also where its step is written out with
gates; the cache of a streamed convolution has channels on its second axis.  Both are part of a model's interface, so
they lose channels only if the caller allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import integer, integers, maker_of, name_of
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.flow import Flow
from onnxgrail.graph.trace.labels import Mark

STAYS = "its state is an input and an output of the model"
STATE = f"{STAYS}; --kv-io narrows the interface too"
SAME = frozenset({"Identity", "Cast", "Slice", "Split", "Concat", "Pad"})
RECURRENT = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
GATES = frozenset({"Sigmoid", "HardSigmoid"})
LIMIT = 256  # nodes visited per input


@dataclass(frozen=True, slots=True)
class _Step:
    """A tensor computed from an input.

    Attributes:
        value: the tensor.
        axes: for each of its axes the axis of the input, None for a new axis.
        joined: axes of the input along which other values were concatenated.
    """

    value: ir.Value
    axes: tuple[int | None, ...]
    joined: frozenset[int] = frozenset()


_Reading = Callable[[ir.Node, int, _Step, Facts], int | None]


def state_axes(model: ir.Model, facts: Facts) -> dict[str, int]:
    """Return the channel axis of every input that is a state: an output of the same shape returns its next value."""
    outputs = {facts.shapes.get(value.name or "") for value in model.graph.outputs}
    found = {}
    others = []
    for value in model.graph.inputs:
        name = value.name or ""
        shape = facts.shapes.get(name)
        if shape is None or name in facts.constants or facts.dtypes[name].kind in "iub" or shape not in outputs:
            continue
        axis = _channel_axis(value, len(shape), facts, (_of_layer, _of_gate))
        if axis is None:
            others.append((value, shape))
        else:
            found[name] = axis
    same = {facts.shapes[name]: axis for name, axis in found.items()}  # the output that gates let through, beside cells
    for value, shape in others:
        if shape in same and _channel_axis(value, len(shape), facts, (_of_product,)) == same[shape]:
            found[value.name or ""] = same[shape]
    return found


def seed(flow: Flow) -> None:
    """Give states labels of their own, before any node is visited."""
    for name, axis in flow.state_axes.items():
        labels = flow.labels.fresh(flow.facts.shapes[name][axis])
        flow.marks[name] = (Mark((axis,), labels),)
        flow.states[name] = labels


def hands_on(flow: Flow, marks: Iterable[Mark], shape: tuple[int, ...]) -> bool:
    """Return True if a tensor has the channels of a state of the same shape, each at the same position."""
    alike = [labels for name, labels in flow.states.items() if flow.facts.shapes[name] == shape]
    return all(any(_same(flow, mark.labels, labels) for labels in alike) for mark in marks)


def _same(flow: Flow, found: Ints, labels: Ints) -> bool:
    return found.shape == labels.shape and np.array_equal(flow.labels.find(found), flow.labels.find(labels))


def _channel_axis(value: ir.Value, rank: int, facts: Facts, readings: Sequence[_Reading]) -> int | None:
    """Return the axis of an input whose positions a node reads as channels, in one of these ways."""
    queue, seen = [_Step(value, tuple(range(rank)))], 0
    while queue and seen < LIMIT:
        step = queue.pop(0)
        for node, slot in step.value.uses():
            seen += 1
            axes = () if node.domain else [reading(node, slot, step, facts) for reading in readings]
            axis = next((a for a in axes if a is not None and a not in step.joined), None)
            if axis is not None:
                return axis
            queue += _beyond(node, slot, step, facts)
    return None


def _of_layer(node: ir.Node, slot: int, step: _Step, facts: Facts) -> int | None:  # noqa: ARG001
    """Return the hidden units of a recurrent layer, or the channels that a streamed convolution reads."""
    if slot in RECURRENT.get(node.op_type, ()):
        return step.axes[-1]
    streamed = node.op_type in ("Conv", "ConvTranspose") and slot == 0 and step.joined and len(step.axes) > 1
    return step.axes[1] if streamed else None


def _of_gate(node: ir.Node, slot: int, step: _Step, facts: Facts) -> int | None:  # noqa: ARG001
    """Return the units of a cell written out: a gate, or one minus a gate, multiplies its state."""
    maker = maker_of(node, 1 - slot) if node.op_type == "Mul" else None
    if maker is not None and maker.op_type == "Sub":
        maker = maker_of(maker, 1)
    return step.axes[-1] if step.axes and maker is not None and maker.op_type in GATES else None


def _of_product(node: ir.Node, slot: int, step: _Step, facts: Facts) -> int | None:
    """Return the features that a constant matrix multiplies."""
    fits = slot == 0 and node.op_type in ("MatMul", "Gemm") and name_of(node, 1) in facts.constants
    return step.axes[-1] if fits and step.axes and not integer(node, "transA") else None


def _beyond(node: ir.Node, slot: int, step: _Step, facts: Facts) -> list[_Step]:
    """Return the outputs of a node to which the state, or a part of it, is copied."""
    axes, joined = step.axes, step.joined
    if node.domain or (slot != 0 and node.op_type != "Concat"):
        return []
    if node.op_type == "Concat":
        along = axes[integer(node, "axis") % len(axes)]
        joined |= {along} if along is not None and len(node.inputs) > 1 else set()
    elif node.op_type == "Transpose":
        order = integers(node, "perm") or tuple(reversed(range(len(axes))))
        axes = tuple(axes[k] for k in order)
    elif node.op_type == "Gather":
        index = facts.shapes.get(name_of(node, 1))
        if index is None or len(index) > 1:
            return []
        place = integer(node, "axis") % len(axes)
        axes = axes if index else (*axes[:place], *axes[place + 1 :])
    elif node.op_type in ("Squeeze", "Unsqueeze"):
        changed = _reshaped(node, step, facts)
        if changed is None:
            return []
        axes = changed
    elif node.op_type not in SAME:
        return []
    return [_Step(out, axes, joined) for out in node.outputs]


def _reshaped(node: ir.Node, step: _Step, facts: Facts) -> tuple[int | None, ...] | None:
    """Return the axes after a Squeeze or Unsqueeze; None if its axes are not known."""
    named = facts.values.get(name_of(node, 1))
    places = integers(node, "axes") or (() if named is None else tuple(int(k) for k in np.ravel(named)))
    if not places:
        return None
    rank = len(step.axes)
    if node.op_type == "Squeeze":
        gone = {place % rank for place in places}
        return tuple(axis for k, axis in enumerate(step.axes) if k not in gone)
    new = {place % (rank + len(places)) for place in places}
    left = iter(step.axes)
    return tuple(None if k in new else next(left) for k in range(rank + len(places)))
