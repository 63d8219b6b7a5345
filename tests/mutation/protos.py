"""Mutations of a model as messages: any field of any message, and the mistakes that have a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor as Kind
from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

Rng = np.random.Generator
MARK = "<img src=x onerror=alert(1)>"
NAMES = ("", " ", "x", "y", "w0", "名前 é\u202e", "n" * 20_000, "a\nb\tc", "../../up", "/etc/x", "[/red]", "%s{0}",
         MARK, "\x1b[2Jgone", "\x00", "__proto__", "CON")  # fmt: skip
FORMULAS = ("N*9999999999", "N**9999999", "1/0", "(" * 500, "-" * 5000 + "1", "past+1", "N*-1", "9" * 5000, "N-100")
OPS = ("Relu", "MatMul", "Gemm", "Conv", "Reshape", "Transpose", "Add", "Concat", "Split", "If", "Loop", "Softmax",
       "Gather", "Constant", "ConstantOfShape", "Expand", "Resize", "Attention", "LSTM", "Einsum", "TopK", "NonZero",
       "SequenceConstruct", "Identity", "Tile", "Pad", "DequantizeLinear", "NoSuchOp", "RandomNormal")  # fmt: skip
INTEGERS = (-(2**31), -1000, -2, -1, 0, 1, 2, 3, 7, 1000, 2**16, 2**31 - 1)
LONG = (-(2**63), -(2**32), 2**32, 2**40, 2**62, 2**63 - 1)
FLOATS = (0.0, -1.0, 1e30, -1e30, 1e-40, float("nan"), float("inf"), float("-inf"))


def messages(message: Message) -> Iterator[Message]:
    """A message and all that it holds."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from messages(inner)


def pick(some: Any, rng: Rng) -> Any:
    """One of them."""
    found = list(some)
    return found[int(rng.integers(len(found)))] if found else None


def any_field(model: ModelProto, rng: Rng) -> None:
    """A field of some message is gone, there twice, or extreme."""
    message = pick(messages(model), rng)
    change = rng.random()
    there = message.ListFields()
    if there and change < 0.7:
        field, value = pick(there, rng)
        if change < 0.2:
            message.ClearField(field.name)
        elif field.is_repeated:
            _change_repeated(field, value, rng)
        elif field.message_type is None:
            setattr(message, field.name, extreme(field, rng))
        else:
            value.Clear()
        return
    field = pick(message.DESCRIPTOR.fields, rng)
    if field.is_repeated:
        _change_repeated(field, getattr(message, field.name), rng)
    elif field.message_type is None:
        setattr(message, field.name, extreme(field, rng))
    else:
        getattr(message, field.name).SetInParent()


def _change_repeated(field: Any, values: Any, rng: Rng) -> None:
    action = rng.random()
    if field.message_type is not None:
        if not values or action < 0.2:
            values.add()
        elif action < 0.6:
            values.add().CopyFrom(pick(values, rng))
        else:
            del values[int(rng.integers(len(values)))]
    elif not values or action < 0.3:
        values.append(extreme(field, rng))
    elif action < 0.6:
        values[int(rng.integers(len(values)))] = extreme(field, rng)
    elif action < 0.8:
        values.append(pick(values, rng))
    else:
        del values[int(rng.integers(len(values)))]


def extreme(field: Any, rng: Rng) -> Any:
    """A value that nobody expects there."""
    if field.type == Kind.TYPE_STRING:
        return pick(NAMES, rng)
    if field.type == Kind.TYPE_BYTES:
        return bytes(rng.integers(0, 256, int(rng.choice([0, 1, 4, 33])), dtype=np.uint8))
    if field.type in (Kind.TYPE_FLOAT, Kind.TYPE_DOUBLE):
        return pick(FLOATS, rng)
    if field.type == Kind.TYPE_ENUM:
        return pick(field.enum_type.values, rng).number
    if field.type == Kind.TYPE_UINT64:
        return abs(pick((*INTEGERS, *LONG[1:]), rng))
    return pick(INTEGERS if field.type == Kind.TYPE_INT32 else (*INTEGERS, *LONG), rng)


# ---------------------------------------------------------------------------------------------- mistakes with a name


def graphs(model: ModelProto) -> list[GraphProto]:
    """The graph and all bodies."""
    return [m for m in messages(model) if isinstance(m, GraphProto)]


def nodes(model: ModelProto) -> list[NodeProto]:
    """All nodes."""
    return [m for m in messages(model) if isinstance(m, NodeProto)]


def tensors(model: ModelProto) -> list[TensorProto]:
    """All weights."""
    return [m for m in messages(model) if isinstance(m, TensorProto)]


def dims(model: ModelProto, rng: Rng) -> None:
    """A size of a weight is another one; its bytes are not."""
    tensor = pick((t for t in tensors(model) if t.dims), rng)
    tensor.dims[int(rng.integers(len(tensor.dims)))] = pick((*INTEGERS, *LONG), rng)


def many_dims(model: ModelProto, rng: Rng) -> None:
    """A weight has more axes than numpy knows."""
    tensor = pick(tensors(model), rng)
    tensor.dims.extend([1] * int(rng.choice([1, 30, 70, 1000])))


def data_type(model: ModelProto, rng: Rng) -> None:
    """A weight, an input or an output is of another type."""
    kind = pick((*TensorProto.DataType.values(), 99, -1), rng)
    if rng.random() < 0.5:
        pick(tensors(model), rng).data_type = kind
    else:
        pick([*model.graph.input, *model.graph.output], rng).type.tensor_type.elem_type = kind


def retyped_whole(model: ModelProto, rng: Rng) -> None:
    """A weight is of another type, and its bytes with it."""
    tensor = pick(model.graph.initializer, rng)
    kind = pick((np.float16, np.float64, np.int8, np.int64, np.uint8, np.bool_), rng)
    with np.errstate(all="ignore"):
        array = onnx.numpy_helper.to_array(tensor).astype(kind)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def values(model: ModelProto, rng: Rng) -> None:
    """Numbers of a weight are not finite, or huge."""
    tensor = pick(model.graph.initializer, rng)
    array = onnx.numpy_helper.to_array(tensor).copy()
    kinds = FLOATS if array.dtype.kind == "f" else (-128, 127, 0, 1)
    array.ravel()[rng.integers(0, max(array.size, 1), 3) if array.size else []] = pick(kinds, rng)
    if rng.random() < 0.3:
        array = np.full_like(array, pick(kinds, rng))
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def input_shape(model: ModelProto, rng: Rng) -> None:
    """An input is of another shape: huge, empty, negative, without rank, or named like a formula."""
    shape = pick(model.graph.input, rng).type.tensor_type.shape
    action = rng.random()
    if action < 0.2:
        shape.dim.add().dim_value = pick((*INTEGERS, *LONG), rng)
    elif action < 0.3 or not shape.dim:
        shape.Clear()
    elif action < 0.7:
        pick(shape.dim, rng).dim_value = pick((*INTEGERS, *LONG), rng)
    else:
        pick(shape.dim, rng).dim_param = pick((*FORMULAS, *NAMES), rng)


def cycle(model: ModelProto, rng: Rng) -> None:
    """A node reads what is made after it, or itself."""
    graph = pick((g for g in graphs(model) if g.node), rng)
    node, other = pick(graph.node, rng), pick(graph.node, rng)
    if node.input and other.output:
        node.input[int(rng.integers(len(node.input)))] = pick(other.output, rng)


def shuffled(model: ModelProto, rng: Rng) -> None:
    """Nodes stand in another order."""
    graph = pick((g for g in graphs(model) if g.node), rng)
    order = rng.permutation(len(graph.node))
    found = [NodeProto.FromString(graph.node[int(k)].SerializeToString()) for k in order]
    del graph.node[:]
    graph.node.extend(found)


def missing(model: ModelProto, rng: Rng) -> None:
    """A weight is not there."""
    del model.graph.initializer[int(rng.integers(len(model.graph.initializer)))]


def wired(model: ModelProto, rng: Rng) -> None:
    """A node reads another value, more values or fewer."""
    node = pick(nodes(model), rng)
    names = [v.name for v in model.graph.input] + [t.name for t in model.graph.initializer] + ["", "nowhere"]
    names += [name for n in model.graph.node for name in n.output]
    action = rng.random()
    ends = node.input if rng.random() < 0.8 else node.output
    if ends and action < 0.6:
        ends[int(rng.integers(len(ends)))] = pick(names, rng)
    elif ends and action < 0.8:
        ends.pop()
    else:
        ends.append(pick(names, rng))


def op_type(model: ModelProto, rng: Rng) -> None:
    """A node is another operator, or of another domain."""
    node = pick(nodes(model), rng)
    if rng.random() < 0.8:
        node.op_type = pick(OPS, rng)
    else:
        node.domain = pick(("com.microsoft", "local", "nowhere", "ai.onnx.ml", "ai.onnx"), rng)


def attribute(model: ModelProto, rng: Rng) -> None:
    """An attribute is of another type, another value, or an unexpected one."""
    node = pick(nodes(model), rng)
    names = ("axis", "perm", "pads", "strides", "group", "kernel_shape", "transA", "transB", "to", "value",
             "split", "hidden_size", "num_heads", "block_size", "alpha", "equation", "body", "then_branch")  # fmt: skip
    if node.attribute and rng.random() < 0.7:
        name = pick(node.attribute, rng).name
        kept = [AttributeProto.FromString(a.SerializeToString()) for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)
    else:
        name = pick(names, rng)
    tensor = helper.make_tensor("t", TensorProto.INT64, [2], [1, -5])
    some = (-1, 0, 3, 2**40, 1.5, float("nan"), "text", [], [0], [-1, 5], [2**40] * 4, list(range(300)), [0.5],
            ["a", "b"], TensorProto(), tensor, GraphProto(), NONE)  # fmt: skip
    value = pick(some, rng)
    if value is NONE or value == []:
        node.attribute.add(name=name, type=pick(AttributeProto.AttributeType.values(), rng))
    else:
        node.attribute.append(helper.make_attribute(name, value))


NONE = object()


def versions(model: ModelProto, rng: Rng) -> None:
    """Versions that are not."""
    if rng.random() < 0.3:
        model.ir_version = pick((0, 1, 3, 4, 11, 99, 2**40, -1), rng)
    elif rng.random() < 0.9 and model.opset_import:
        pick(model.opset_import, rng).version = pick((0, 1, 5, 7, 9, 12, 18, 26, 1000, 2**62, -1), rng)
    else:
        model.opset_import.add(domain=pick(("", "ai.onnx", "local", "com.microsoft", MARK), rng), version=7)


def duplicated(model: ModelProto, rng: Rng) -> None:
    """Two things of one name."""
    lists = (model.graph.node, model.graph.initializer, model.graph.input, model.graph.output, model.functions)
    some = pick([one for one in lists if one], rng)
    some.add().CopyFrom(pick(some, rng))
    some[-1].name = pick((some[-1].name, "other"), rng)


def renamed(model: ModelProto, rng: Rng) -> None:
    """A value has a strange name wherever it is."""
    old = pick([*(n for node in model.graph.node for n in node.output), *(v.name for v in model.graph.input)], rng)
    new = pick(NAMES, rng)
    for message in messages(model):
        if isinstance(message, NodeProto):
            for ends in (message.input, message.output):
                for k, name in enumerate(ends):
                    ends[k] = new if name == old else name
        elif not isinstance(message, ModelProto) and getattr(message, "name", None) == old:
            message.name = new


PLAIN = (any_field, dims, many_dims, data_type, retyped_whole, values, input_shape, cycle, shuffled, missing, wired,
         op_type, attribute, versions, duplicated, renamed)  # fmt: skip
