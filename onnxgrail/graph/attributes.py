"""Read names and attributes of ONNX nodes as plain Python values, with the operator's default for what is missing.

An attribute of the wrong type counts as missing: it is read before the runtime has refused the node.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import onnx_ir as ir

from onnxgrail.core import Array

MICROSOFT = "com.microsoft"  # domain of the operators that ONNX Runtime adds
NCHWC = "com.microsoft.nchwc"  # of those on blocks of channels, as many as suit the processor
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
BIASED, BIAS = ("Conv", "ConvTranspose", "Gemm"), 2  # layers with a bias, and its slot
LAYOUTS = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"})  # of as many numbers
NUMBERS = (ir.AttributeType.INT, ir.AttributeType.FLOAT)


def names_of(values: Iterable[ir.Value | None]) -> list[str]:
    """Return the names of values, '' for those that are absent or have none."""
    return [(value.name or "") if value is not None else "" for value in values]


def is_read(value: ir.Value) -> bool:
    """Return True if a node reads a value, or the model gives it out."""
    return bool(value.uses()) or value.is_graph_output()


def name_of(node: ir.Node, operand: int) -> str:
    """Return the name of an input, '' if absent."""
    return names_of(node.inputs[operand : operand + 1])[0] if 0 <= operand < len(node.inputs) else ""


def input_of(node: ir.Node, operand: int) -> ir.Value | None:
    """Return an input; None if it is absent."""
    return node.inputs[operand] if operand < len(node.inputs) else None


def given(node: ir.Node, operand: int) -> ir.Value:
    """Return an input that is present."""
    value = node.inputs[operand]
    assert value is not None, f"{node.op_type} {node.name} has no input {operand}"
    return value


def maker_of(node: ir.Node, operand: int) -> ir.Node | None:
    """Return the node that computes an input; None for constants, inputs of the model, and absent inputs."""
    value = input_of(node, operand)
    return None if value is None else value.producer()


def moved_from(value: ir.Value, ops: Container[str]) -> ir.Value:
    """Return the value from which nodes of these ops, one after the other, make a value; itself if there are none."""
    node = value.producer()
    while node is not None and not node.domain and node.op_type in ops and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def numbers_of(value: ir.Value) -> Array:
    """Return the numbers of a stored constant."""
    assert value.const_value is not None, f"{value.name} is no stored constant"
    return value.const_value.numpy()


def written(node: ir.Node | None) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node; None for other nodes, and if it is written as numbers or text."""
    found = node.attributes.get("value") if node is not None and node.op_type == "Constant" else None
    if found is None or found.type != ir.AttributeType.TENSOR:
        return None
    tensor: ir.TensorProtocol = found.value  # not `as_tensor`, whose check of a protocol takes a fifth of `inspect`
    return tensor


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    """Return an integer attribute, or the default."""
    found = node.attributes.get(name)
    return default if found is None or found.type != ir.AttributeType.INT else found.as_int()


def integers(node: ir.Node, name: str, default: Iterable[int] = ()) -> tuple[int, ...]:
    """Return a list of integers attribute, or the default."""
    found = node.attributes.get(name)
    return tuple(default) if found is None or found.type != ir.AttributeType.INTS else tuple(found.as_ints())


def number(node: ir.Node, name: str, default: float = 0.0) -> float:
    """Return a numeric attribute (int or float) as a float, or the default."""
    found = node.attributes.get(name)
    return default if found is None or found.type not in NUMBERS else float(found.value)


def text(node: ir.Node, name: str, default: str = "") -> str:
    """Return a string attribute, or the default."""
    found = node.attributes.get(name)
    return default if found is None or found.type != ir.AttributeType.STRING else found.as_string()


def sole(value: ir.Value) -> ir.Node | None:
    """Return the only reader of a value; None if there are several, or if it is an output."""
    readers = {use.node for use in value.uses()}
    return next(iter(readers)) if len(readers) == 1 and not value.is_graph_output() else None
