"""Find places where activation channels can be scaled and shifted by changing constants only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, input_of, integer, maker_of, moved_from
from onnxgrail.graph.cost.counting import PRODUCTS
from onnxgrail.graph.trace.facts import Facts, captures, constant_of, key
from onnxgrail.graph.trace.survey import Operand, Survey

FAR = 400  # nodes visited


# (domain is Microsoft's, op) -> operands of scale and bias (-1 for none), True if channels are axis 1
FUSED: Mapping[tuple[bool, str], tuple[int, int, bool]] = {
    (False, "BatchNormalization"): (1, 2, True),
    (False, "InstanceNormalization"): (1, 2, True),
    (False, "GroupNormalization"): (1, 2, True),
    (False, "LayerNormalization"): (1, 2, False),
    (False, "RMSNormalization"): (1, -1, False),
    (False, "SimplifiedLayerNormalization"): (1, -1, False),
    (True, "SkipLayerNormalization"): (2, 3, False),
    (True, "SkipSimplifiedLayerNormalization"): (2, -1, False),
    (True, "EmbedLayerNormalization"): (5, 6, False),
}
ROOTS = ("Sqrt", "Pow")
BETWEEN = ("Add", "Max", "Clip", "Cast", "Identity", "Reciprocal", "Div", *ROOTS)  # from a mean of squares to its root


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A constant operand with one slice per channel along `axis`, read by one node only."""

    node: str
    operand: int
    param: str
    value: str
    axis: int


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The constants of a place; `shift` as in `Place`."""

    scale: Part
    bias: Part | None
    shift: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """An activation whose channels are scaled by `scale` and shifted by `bias`.

    Attributes:
        kind: `repair` for the output of a convolution (after its batch normalization), `refit` for a normalization.
        node: key of the normalization or convolution; position: of the first node with a constant that may change.
        output: the activation; axis: its channel axis.
        scale: the scale constant.
        bias: the bias constant, or None; shift: a bias can then be created at `node`.
        judged: the tensor at which a change is measured: everything computed from `output` passes through it.
    """

    kind: Literal["repair", "refit"]
    node: str
    position: int
    output: str
    axis: int
    scale: Part
    bias: Part | None
    shift: bool
    judged: str


def widened(model: ir.Model, survey: Survey) -> Survey:
    """Return the survey with the constants of all places among its operands, including those that lose no position."""
    parts = [p for place in places(model, survey) for p in (place.scale, place.bias) if p is not None]
    more = {(p.node, p.operand): Operand(p.param, p.value, {}) for p in parts}
    return dataclasses.replace(survey, operands={**more, **survey.operands})


def places(model: ir.Model, survey: Survey) -> tuple[Place, ...]:
    """Return all places, in node order.

    Constants that are computed, quantized or read by several nodes are left out: no single output determines a shared
    one.
    """
    finder = _Finder(model, survey)
    found = [place for position, node in enumerate(model.graph) for place in finder.at(node, position)]
    return tuple(sorted(found, key=lambda p: p.position))


class _Finder:
    """The state shared by all searches in one graph."""

    def __init__(self, model: ir.Model, survey: Survey) -> None:
        self.model, self.survey, self.facts = model, survey, survey.facts
        self.captured = {name for node in model.graph for name in captures(node)}
        self.claims: dict[str, int] = {}
        for operand in survey.operands.values():
            self.claims[operand.param] = self.claims.get(operand.param, 0) + 1

    def at(self, node: ir.Node, position: int) -> Iterator[Place]:
        """Yield the places whose scale is a constant of this node."""
        known = all(v is None or not v.name or v.name in self.facts.shapes for v in (*node.inputs, *node.outputs))
        if not known or not node.outputs or key(node) in self.facts.constants:
            return
        fused = FUSED.get((node.domain == MICROSOFT, node.op_type))
        if fused is not None:
            yield from self._fused(node, position, fused)
        elif node.op_type == "Conv" and not node.domain and not _has_norm_behind(node):
            yield from self._conv(node, position)
        elif node.op_type == "Mul" and not node.domain:
            yield from self._apart(node, position)

    def _fused(self, node: ir.Node, position: int, form: tuple[int, int, bool]) -> Iterator[Place]:
        scale, bias, second = form
        rank, shape = len(self.facts.shapes[key(node)]), self.facts.shapes[key(node)]
        axis = 1 if second else rank - 1
        if rank < 2 or integer(node, "training_mode"):
            return
        if node.op_type == "InstanceNormalization" and all(u.node.op_type == "Reshape" for u in node.outputs[0].uses()):
            return  # part of a decomposed group norm: its scale comes after the Reshape
        scales = self._part(node, scale, shape[axis])
        has_bias = 0 < bias < len(node.inputs) and node.inputs[bias] is not None
        shifts = self._part(node, bias, shape[axis]) if has_bias else None
        if scales is None or (has_bias and shifts is None):
            return
        repaired = node.op_type == "BatchNormalization" and _behind_conv(node)
        kind: Literal["repair", "refit"] = "repair" if repaired else "refit"
        yield self._place(kind, node, node.outputs[0], position, axis, _Parts(scales, shifts))

    def _conv(self, node: ir.Node, position: int) -> Iterator[Place]:
        shape = self.facts.shapes[key(node)]
        weight = self._part(node, 1, shape[1], axis=0)
        has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
        bias = self._part(node, 2, shape[1]) if has_bias else None
        if weight is not None and has_bias == (bias is not None):
            yield self._place("repair", node, node.outputs[0], position, 1, _Parts(weight, bias, shift=not has_bias))

    def _apart(self, node: ir.Node, position: int) -> Iterator[Place]:
        """Yield the place of a decomposed normalization: a product with a constant, optionally plus a constant."""
        shape = self.facts.shapes[key(node)]
        for operand in (0, 1):
            other = node.inputs[1 - operand]
            place = self._along(node, operand, shape)
            if place is None or other is None or not self._normalised(other, place[1]):
                continue
            scale, axis = place
            uses, output, bias = list(node.outputs[0].uses()), node.outputs[0], None
            if len(uses) == 1 and uses[0].node.op_type == "Add" and not output.is_graph_output():
                added = uses[0].node
                found = self._along(added, 1 - uses[0].idx, shape) if key(added) in self.facts.shapes else None
                if found is not None and found[1] == axis:
                    bias, output = found[0], added.outputs[0]
            yield self._place("refit", node, output, position, axis, _Parts(scale, bias))
            return

    def _place(
        self,
        kind: Literal["repair", "refit"],
        node: ir.Node,
        output: ir.Value,
        position: int,
        axis: int,
        parts: _Parts,
    ) -> Place:
        return Place(
            kind=kind,
            node=key(node),
            position=position,
            output=output.name or "",
            axis=axis,
            scale=parts.scale,
            bias=parts.bias,
            shift=parts.shift,
            judged=judge_at(self.model, output, position, self.facts),
        )

    def _part(self, node: ir.Node, operand: int, channels: int, *, axis: int | None = None) -> Part | None:
        """Return a constant of this node alone, with one slice per channel; None for others."""
        value = input_of(node, operand)
        if value is None or not value.name or value.name not in self.facts.constants:
            return None
        producer = value.producer()
        own = len(value.uses()) == 1 and not value.is_graph_output() and value.name not in self.captured
        if not own or (producer is not None and producer.op_type != "Constant"):
            return None
        array = constant_of(value, value.name, self.facts)
        if array is None or array.dtype.kind != "f":
            return None
        claim = self.survey.operands.get((key(node), operand))
        if claim is not None and (claim.value != value.name or self.claims[claim.param] > 1):
            return None
        axes = [a for a, size in enumerate(array.shape) if size == channels] if axis is None else [axis]
        if not axes or array.shape[axes[-1]] != channels or (axis is None and array.size != channels):
            return None
        param = claim.param if claim is not None else value.name
        return Part(node=key(node), operand=operand, param=param, value=value.name, axis=axes[-1])

    def _along(self, node: ir.Node, operand: int, shape: tuple[int, ...]) -> tuple[Part, int] | None:
        """Return an operand of an elementwise node with one number per channel, and the output's channel axis."""
        value = node.inputs[operand]
        own = self.facts.shapes.get(value.name or "", ()) if value is not None else ()
        wide = [a for a, size in enumerate(own) if size > 1]
        if len(wide) != 1 or len(own) > len(shape) or self.facts.shapes[key(node)] != shape:
            return None
        axis = len(shape) - len(own) + wide[0]
        part = self._part(node, operand, own[wide[0]])
        return (part, axis) if part is not None and own[wide[0]] == shape[axis] and axis > 0 else None

    def _normalised(self, value: ir.Value, axis: int) -> bool:
        """Return True if a value was divided by its standard deviation along an axis."""
        node = moved_from(value, ("Cast", "Identity")).producer()
        if node is None:
            return False
        if node.op_type == "Reshape":  # a decomposed group norm
            source = maker_of(node, 0)
            return source is not None and source.op_type == "InstanceNormalization"
        if node.op_type == "Div":
            return self._deviation(node.inputs[1], axis)
        return node.op_type == "Mul" and any(self._deviation(v, axis) for v in node.inputs)

    def _deviation(self, value: ir.Value | None, axis: int) -> bool:
        """Return True if a value is the root of a mean along an axis, or its reciprocal."""
        seen: list[ir.Node] = []
        while value is not None and (node := value.producer()) is not None:
            if node.op_type == "ReduceMean":
                shape = self.facts.shapes.get(key(node), ())
                rooted = any(n.op_type in ROOTS for n in seen)
                return rooted and axis < len(shape) and shape[axis] == 1
            if node.op_type not in BETWEEN or len(seen) > 8:
                return False
            seen.append(node)
            open_ = [v for v in node.inputs if v is not None and v.name not in self.facts.constants]
            value = open_[0] if len(open_) == 1 else None
        return False


def _has_norm_behind(node: ir.Node) -> bool:
    """Return True if a batch normalization is the only reader of the output."""
    output = node.outputs[0]
    uses = list(output.uses())
    return len(uses) == 1 and not output.is_graph_output() and uses[0].node.op_type == "BatchNormalization"


def _behind_conv(node: ir.Node) -> bool:
    """Return True if the input comes from a convolution without other readers."""
    source = maker_of(node, 0)
    return source is not None and source.op_type in ("Conv", "ConvTranspose") and _has_norm_behind(source)


def judge_at(model: ir.Model, output: ir.Value, position: int, facts: Facts) -> str:
    """Return the first tensor after a product with `output` through which everything computed from it passes.

    For a convolution in a residual branch that is the output of the next convolution; for the norm before an attention,
    the attention's output; if that is added to a residual, the sum.  Without such a tensor nearby it is `output`
    itself.
    """
    reach, left = {output.name}, {output.name: _readers(output)}
    contracted = False
    nodes = list(model.graph)[position + 1 :]
    for node in nodes[:FAR]:
        read = ({v.name for v in node.inputs if v is not None} | captures(node)) & reach
        if not read:
            continue
        for name in read:
            left[name] -= sum(v is not None and v.name == name for v in node.inputs) or 1
        contracted |= node.op_type in PRODUCTS or "MatMul" in node.op_type
        if node.op_type not in ("Shape", "Size"):
            reach |= {v.name for v in node.outputs if v.name}
            left |= {v.name: _readers(v) for v in node.outputs if v.name and _readers(v)}
        live = [name for name in reach if left.get(name, 0) > 0]
        if not live:
            break
        mine = next((v for v in node.outputs if [v.name] == live), None)
        if mine is not None and (contracted or mine.is_graph_output()) and _is_float(mine, facts):
            return _joined(mine, facts)
    return output.name or ""


def _readers(value: ir.Value) -> int:
    """Count the readers of a value, with the model's output as one."""
    return len(value.uses()) + value.is_graph_output()


def _is_float(value: ir.Value, facts: Facts) -> bool:
    dtype = facts.dtypes.get(value.name or "")
    return dtype is not None and dtype.kind == "f" and len(facts.shapes[value.name or ""]) > 1


def _joined(value: ir.Value, facts: Facts) -> str:
    """Follow a value through the Add of a bias and the Add of a residual, while that Add is the only reader."""
    for _ in range(2):
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != "Add":
            break
        total = uses[0].node.outputs[0]
        if not _is_float(total, facts):
            break
        value = total
    return value.name or ""
