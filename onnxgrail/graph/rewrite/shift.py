"""Shift biases: add to an existing bias, or create one."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.attributes import input_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import own_node, set_operands, sweep
from onnxgrail.graph.stored.find import is_wide
from onnxgrail.graph.trace.facts import captures, key
from onnxgrail.graph.trace.survey import Ledger, Survey


def shift_biases(graph: ir.Graph, nodes: list[ir.Node], survey: Survey, ledger: Ledger) -> None:
    """Add the ledger's shifts, without the removed positions, to the outputs of their nodes.

    Args:
        graph: changed in place, already narrowed.
        nodes: its nodes.
        survey: the trace of the original model.
        ledger: the decisions.
    """
    captured = {name for node in nodes for name in captures(node)}
    for node in nodes:
        shift = ledger.shifts.get(key(node))
        if shift is None:
            continue
        name = key(node)
        axis = 1 if node.op_type == "Conv" else len(survey.facts.shapes[name]) - 1
        for mark in survey.marks.get(name, ()):
            if mark.axes == (axis,):
                shift = shift[~ledger.dead[mark.labels]]
        weight = node.inputs[1]  # has the output's dtype; facts show bfloat16 outputs as float32
        narrow = weight is not None and weight.dtype == ir.DataType.BFLOAT16
        shift = shift.astype(ir.DataType.BFLOAT16.numpy() if narrow else survey.facts.dtypes[name])
        if node.op_type == "MatMul":
            _behind(graph, node, shift, survey, ledger, captured)
        else:
            _inside(graph, node, shift, survey, ledger, captured)


def _inside(
    graph: ir.Graph, node: ir.Node, shift: Array, survey: Survey, ledger: Ledger, captured: Collection[str]
) -> None:
    """Add a shift to the bias input of a Conv or Gemm."""
    old = input_of(node, 2)
    computed = _computed(node, 2, survey, ledger)
    if old is None:
        node.resize_inputs(3)
        node.replace_input_with(2, constant(graph, shift, f"{key(node)}/bias"))
    elif old.const_value is not None:
        sweep(graph, set_operands(graph, [(node, 2)], old.const_value.numpy() + shift, captured))
    elif is_wide(old):
        _coded(graph, node, old, shift, captured)
    elif computed is not None:
        node.replace_input_with(2, constant(graph, computed + shift, f"{key(node)}/bias"))
        sweep(graph, {old})
    else:
        spatial = len(survey.facts.shapes[key(node)]) - 2 if node.op_type == "Conv" else 0
        _add(graph, node, shift.reshape(-1, *(1,) * spatial))


def _coded(graph: ir.Graph, node: ir.Node, old: ir.Value, shift: Array, captured: Collection[str]) -> None:
    """Add a shift to a bias that is stored in integers: its scale stays, since kernels expect it."""
    holder = own_node(graph, old, [(node, 2)])
    codes, scale = (v.const_value.numpy() for v in holder.inputs[:2] if v is not None and v.const_value is not None)
    step, limits = scale.astype(np.float64).ravel(), np.iinfo(codes.dtype)
    more = np.divide(shift, step, out=np.zeros(codes.shape), where=step > 0)
    new = np.clip(np.rint(codes + more), limits.min, limits.max).astype(codes.dtype)
    sweep(graph, set_operands(graph, [(holder, 0)], new, captured))


def _computed(node: ir.Node, place: int, survey: Survey, ledger: Ledger) -> Array | None:
    """Return the remaining numbers of a bias that is computed from constants; None if they are not known."""
    old = input_of(node, place)
    operand = survey.operands.get((key(node), place))
    name = operand.value if operand is not None else (old.name or "") if old is not None else ""
    if name not in survey.facts.constants or name not in survey.facts.values:
        return None
    if operand is None:
        return survey.facts.values[name]
    return operand.narrowed(ledger.arrays.get(operand.param, survey.facts.values[name]), ledger.dead)


def _behind(
    graph: ir.Graph, node: ir.Node, shift: Array, survey: Survey, ledger: Ledger, captured: Collection[str]
) -> None:
    """Add a shift to the constant that is added to a MatMul's output, or insert an Add."""
    uses = list(node.outputs[0].uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add" and not node.outputs[0].is_graph_output():
        add, other = uses[0].node, 1 - uses[0].idx
        bias = add.inputs[other]
        stored = None if bias is None else bias.const_value
        array = _computed(add, other, survey, ledger) if stored is None else stored.numpy()
        if bias is not None and array is not None and array.size == shift.size:
            array = array + shift.reshape(array.shape)
            if stored is not None:
                sweep(graph, set_operands(graph, [(add, other)], array, captured))
                return
            add.replace_input_with(other, constant(graph, array, f"{key(node)}/bias"))
            sweep(graph, {bias})
            return
    _add(graph, node, shift)


def _add(graph: ir.Graph, node: ir.Node, shift: Array) -> None:
    """Insert an Add after the output; the sum takes over the output's name, so readers get the shifted value."""
    old, name = node.outputs[0], key(node)
    added = ir.Node("", "Add", [old, constant(graph, np.array(shift), f"{name}/shift")], name=f"{name}/shifted")
    new = added.outputs[0]
    new.type, new.shape = old.type, old.shape
    graph.insert_after(node, added)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    added.replace_input_with(0, old)
    old.name, new.name = f"{name}/unshifted", name
