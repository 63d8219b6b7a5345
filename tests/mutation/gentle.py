"""Mutations that mostly leave a model that runs, and take it into corners: widths of none, odd notes, no inputs."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxgrail.graph.rewrite import interface
from onnxgrail.recipe import storage
from tests.mutation.protos import FLOATS, MARK, NAMES, messages, pick

Rng = np.random.Generator
WIDTH = 8  # of everything between inputs and outputs of the good models
STEPS = ("Identity", "Relu", "Neg", "Cast", "Dropout", "Squash", "Softmax", "NonZero", "Shape", "QuantizeLinear")
SCOPES = "pkg.torch.onnx.name_scopes"
KEYS = (interface.NOTE, storage.KEY, SCOPES, SCOPES, "pkg.torch.onnx.stack_trace")  # that somebody reads
PORT = '{"name": "x", "axis": 0, "before": 8, "after": 2, "kept": [0, 1]}'
RUN = '{"command": "\\ud800", "version": "\\u001b[2J", "recipe": {"ratio": "x", "blocks": 7, "no": []}}'
NOTES = (
    "null", "5", "{}", "[]", "''", "[[]]", "1e999", "[" * 5000, "-" * 5000 + "1", "'text'", "__import__('os')",
    '[{"command": 1, "recipe": {}}]', '[{"command": null, "recipe": 3}]', f"[{RUN}]", f"[{PORT}]", f"[{PORT}, {RUN}]",
    f"[{PORT}]".replace("1", "1" + "0" * 30), "['', 'm', 'm.layer', 'm.layer']", "['', '../up', '\x1b[2J', 'linear']",
    "[1, 2, 3]", "[[], [0], {}]", "['a'] * 9", "['" + "n" * 20_000 + "', 'x']", f"['{MARK}', '{MARK}', '']",
)  # fmt: skip


def narrowed(model: ModelProto, rng: Rng) -> None:
    """All hidden widths are none, one, or odd."""
    width = pick((0, 1, 3, 7), rng)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if WIDTH in array.shape:
            cut = array[tuple(slice(width) if size == WIDTH else slice(None) for size in array.shape)]
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(cut), tensor.name))


def inserted(model: ModelProto, rng: Rng) -> None:
    """One more node on the way."""
    node = pick(model.graph.node, rng)
    name = node.input[0]
    step = pick(STEPS, rng)
    if step == "Squash":
        steps = [("Transpose", [name], {"perm": [1, 0]}), ("Transpose", ["new_0"], {"perm": [1, 0]})]
    elif step == "Cast":
        steps = [("Cast", [name], {"to": TensorProto.FLOAT16}), ("Cast", ["new_0"], {"to": TensorProto.FLOAT})]
    else:
        steps = [(step, [name], {})]
    made = [helper.make_node(op, ends, [f"new_{k}"], **given) for k, (op, ends, given) in enumerate(steps)]
    node.input[0] = made[-1].output[0]
    _put(model, made)


def watched(model: ModelProto, rng: Rng) -> None:
    """Make intermediate values outputs, too; or leave no output."""
    if rng.random() < 0.1:
        del model.graph.output[:]
        return
    name = pick(pick(model.graph.node, rng).output, rng)
    model.graph.output.append(helper.make_empty_tensor_value_info(name))
    if rng.random() < 0.5:
        model.graph.output[-1].CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def shared(model: ModelProto, rng: Rng) -> None:
    """Two nodes read one weight of the same shape."""
    first, second = pick(model.graph.initializer, rng), pick(model.graph.initializer, rng)
    if list(first.dims) == list(second.dims):
        for node in model.graph.node:
            for k, name in enumerate(node.input):
                node.input[k] = first.name if name == second.name else name


def constant(model: ModelProto, rng: Rng) -> None:
    """Weights are made by nodes."""
    made = []
    for tensor in list(model.graph.initializer):
        if rng.random() < 0.6:
            made.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
            model.graph.initializer.remove(tensor)
    _put(model, made)


def declared(model: ModelProto, rng: Rng) -> None:
    """Weights are inputs, too; and what is noted about values on the way is not so."""
    for tensor in model.graph.initializer:
        if rng.random() < 0.5:
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for info in model.graph.value_info:
        for dim in info.type.tensor_type.shape.dim:
            if rng.random() < 0.3:
                dim.dim_value = pick((1, 5, 8, 2**40), rng)


def fed(model: ModelProto, rng: Rng) -> None:
    """The batch is fixed, open without a name, or named like nothing else; an input is not read, or there is none."""
    action = rng.random()
    shape = model.graph.input[0].type.tensor_type.shape
    if action < 0.6 and shape.dim:
        shape.dim[0].Clear()
        if action < 0.4:
            shape.dim[0].dim_value = pick((0, 1, 2, 3, 1000), rng)
        elif action < 0.5:
            shape.dim[0].dim_param = MARK
    elif action < 0.8:
        kind = pick(
            (TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.BOOL, TensorProto.UINT8), rng
        )
        model.graph.input.append(helper.make_tensor_value_info("more", kind, pick(([], ["N"], [0], [2, 2], None), rng)))
    else:
        name = model.graph.input[0].name
        sizes = [d.dim_value or 2 for d in shape.dim]
        array = np.full(sizes, pick(FLOATS, rng), np.float32)
        del model.graph.input[:]
        model.graph.initializer.append(numpy_helper.from_array(array, name))


def poisoned(model: ModelProto, rng: Rng) -> None:
    """Numbers on the way overflow, or are none: a factor that is huge, zero or NaN."""
    node = pick(model.graph.node, rng)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(pick(FLOATS, rng)), "poison"))
    made = helper.make_node(pick(("Mul", "Add", "Div", "Pow"), rng), [node.input[0], "poison"], ["bad_value"])
    node.input[0] = "bad_value"
    _put(model, [made])


def remarked(model: ModelProto, rng: Rng) -> None:
    """Notes beside the model, its graph, nodes or weights: keys and values that are odd, empty, long or there twice."""
    places = [message for message in messages(model) if "metadata_props" in message.DESCRIPTOR.fields_by_name]
    kind = type(pick(places, rng))
    same = [place for place in places if type(place) is kind]
    for _ in range(int(rng.integers(1, 4))):
        place = pick((model, model.graph, *same), rng)
        key = pick(KEYS if rng.random() < 0.7 else NAMES, rng)
        for _ in range(int(rng.choice([1, 1, 2]))):
            place.metadata_props.add(key=key, value=pick((*NOTES, *NAMES), rng))


def _put(model: ModelProto, made: list[NodeProto]) -> None:
    """Add nodes, in an order in which every value is made before it is read."""
    waiting = [*made, *(NodeProto.FromString(n.SerializeToString()) for n in model.graph.node)]
    known = {v.name for v in model.graph.input} | {t.name for t in model.graph.initializer} | {""}
    ordered: list[NodeProto] = []
    while waiting:
        ready = next((n for n in waiting if set(n.input) <= known), waiting[0])
        waiting.remove(ready)
        ordered.append(ready)
        known.update(ready.output)
    del model.graph.node[:]
    model.graph.node.extend(ordered)


GENTLE = (narrowed, inserted, watched, shared, constant, declared, fed, poisoned, remarked)
