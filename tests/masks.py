"""The mask of the conformance oracle: consumers that do not read the dead units, in a model of full width.

It is written from the survey alone and shares no code with the rewriter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Bools
from onnxgrail.graph.trace.survey import Survey

Holes = Sequence[tuple[int, Array]]  # axis, positions that are not read


def masked(model: ir.Model, survey: Survey, dead: Bools) -> ir.Model:
    """A copy of full width whose consumers do not read the dead units."""
    copy = model.clone()
    found: dict[str, list[tuple[int, Array]]] = {}
    for block in survey.blocks:
        for slot in block.consumers:
            found.setdefault(slot.initializer, []).append((slot.axis, slot.index[dead[block.ids]].ravel()))
    values = {v.name: v for node in copy.graph for v in node.outputs}
    for name, holes in found.items():
        producer = values[name].producer() if name in values else None
        if any(n.op_type == "MatMulNBits" and n.inputs[1].name == name for n in copy.graph):
            _mask_packed(copy, name, holes)
        elif any(n.op_type == "QMoE" and name in {v.name for v in n.inputs if v is not None} for n in copy.graph):
            _mask_experts(copy, name, holes)
        elif producer is not None and name in survey.facts.stored:
            _mask_behind(copy, producer, holes, survey)
        else:
            _mask_floats(copy, name, holes, survey)
    return copy


def _mask_floats(model: ir.Model, name: str, holes: Holes, survey: Survey) -> None:
    """Zeros in the constant itself."""
    initializer = model.graph.initializers.get(name)
    tensor = initializer.const_value if initializer is not None else None
    array = np.array(survey.facts.values[name] if tensor is None else tensor.numpy())
    for axis, gone in holes:
        np.moveaxis(array, axis, 0)[gone] = 0
    if initializer is not None:
        initializer.const_value = ir.tensor(array, name=name)
    else:
        value = next(v for node in model.graph for v in node.outputs if v.name == name)
        value.replace_all_uses_with(_initial(model, array, f"{name}/masked"))


def _mask_behind(model: ir.Model, node: ir.Node, holes: Holes, survey: Survey) -> None:
    """A product with zeros and ones after a node, and after every other one that makes the same numbers."""
    name = node.outputs[0].name
    mask = np.ones(survey.facts.shapes[name], dtype=survey.facts.dtypes[name])
    for axis, gone in holes:
        np.moveaxis(mask, axis, 0)[gone] = 0
    factor = _initial(model, mask, f"{name}/mask")
    for twin in [n for n in model.graph if _wording(n) == _wording(node)]:
        product = ir.Node("", "Mul", [None, factor])
        product.outputs[0].name = f"{twin.outputs[0].name}/masked"
        twin.outputs[0].replace_all_uses_with(product.outputs[0])
        product.replace_input_with(0, twin.outputs[0])
        model.graph.insert_after(twin, product)


def _wording(node: ir.Node) -> object:
    inputs = [v.name if v is not None else "" for v in node.inputs]
    return node.domain, node.op_type, inputs, {n: a.value for n, a in node.attributes.items()}


def _mask_packed(model: ir.Model, name: str, holes: Holes) -> None:
    """Zeros in what the readers of a packed weight read: blocks could not hold them where zero points are fractions."""
    for number, node in enumerate(n for n in model.graph if n.op_type == "MatMulNBits" and n.inputs[1].name == name):
        mask = np.ones(node.attributes["K"].as_int(), dtype=node.inputs[2].const_value.numpy().dtype)
        for axis, gone in holes:
            assert axis == 1
            mask[gone] = 0
        product = ir.Node("", "Mul", [node.inputs[0], _initial(model, mask, f"{name}/mask{number}")])
        product.outputs[0].name = f"{node.outputs[0].name}/read"
        node.replace_input_with(0, product.outputs[0])
        model.graph.insert_before(node, product)


def _mask_experts(model: ir.Model, name: str, holes: Holes) -> None:
    """Zero points in the packed numbers of a stack of experts."""
    node = next(n for n in model.graph if n.op_type == "QMoE" and name in {v.name for v in n.inputs if v is not None})
    weight = model.graph.initializers[name]
    place = next(k for k, v in enumerate(node.inputs) if v is weight)
    bits = node.attributes["expert_weight_bits"].as_int()
    zero = node.inputs[{2: 11, 5: 12}[place]] if len(node.inputs) > 11 else None
    each = 8 // bits
    numbers = weight.const_value.numpy()
    shifts = np.arange(each, dtype=np.uint8) * bits
    spread = (numbers[..., None] >> shifts & (2**bits - 1)).reshape(*numbers.shape[:2], -1)
    if zero is None:
        middle = np.full(spread.shape, 2 ** (bits - 1), dtype=np.uint8)
    else:
        zeros = zero.const_value.numpy()
        points = (zeros[..., None] >> shifts & (2**bits - 1)).reshape(*zeros.shape[:-1], -1)
        size = node.attributes["block_size"].as_int() if zeros.ndim == 3 else 0
        middle = np.repeat(points, size, axis=2)[..., : spread.shape[2]] if size else points[..., None]
        middle = np.broadcast_to(middle[:, : spread.shape[1]], spread.shape)
    for axis, gone in holes:
        np.moveaxis(spread, axis, 0)[gone] = np.moveaxis(middle, axis, 0)[gone]
    joined = (spread.reshape(*numbers.shape, each) << shifts).sum(axis=-1).astype(np.uint8)
    weight.const_value = ir.tensor(joined, name=name)


def _initial(model: ir.Model, array: Array, name: str) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value
