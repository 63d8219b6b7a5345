"""A model that carries everything a ModelProto can hold beside the network, and a walk over all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from . import nets


def decorated() -> onnx.ModelProto:
    """An MLP with metadata at every level, a function, an overridable default, unused weights and two more branches."""
    model = nets.mlp((12, 32, 24, 10))
    graph = model.graph
    graph.node.extend(
        [
            helper.make_node(
                "Scaled", ["x", "gain"], ["s"], name="call", domain="local", doc_string="calls a function"
            ),
            helper.make_node("Clip", ["s", "", "top"], ["clipped"], name="skips an input"),
            helper.make_node("Dropout", ["clipped"], ["second", ""], name="leaves an output out"),
            helper.make_node("Softmax", ["y"], ["chances"], axis=-1),
        ]
    )
    graph.input.append(nets.info("gain", np.float32, (1,)))
    for name, array in (("gain", [2.0]), ("unused", [3.0, 4.0])):
        graph.initializer.append(numpy_helper.from_array(np.array(array, np.float32), name))
    graph.initializer.append(numpy_helper.from_array(np.float32(6), "top"))
    graph.output.insert(0, nets.info("second", np.float32, ("batch", 12)))
    graph.output.append(nets.info("chances", np.float32, ("batch", 10)))
    shapes = {"z0": 32, "h0": 32, "m1": 24, "z1": 24, "h1": 24, "clipped": 12}
    graph.value_info.extend(nets.info(n, np.float32, ("batch", width)) for n, width in shapes.items())
    model.opset_import.append(helper.make_opsetid("local", 3))
    model.functions.append(_function())
    _annotate(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def _function() -> onnx.FunctionProto:
    function = helper.make_function(
        "local",
        "Scaled",
        ["a", "b"],
        ["c"],
        [helper.make_node("Mul", ["a", "b"], ["c"], name="inner")],
        [helper.make_opsetid("", nets.OPSET)],
    )
    function.doc_string = "a times b"
    function.metadata_props.add(key="function", value="kept")
    function.node[0].metadata_props.add(key="inner", value="kept")
    return function


def _annotate(model: onnx.ModelProto) -> None:
    graph = model.graph
    model.ir_version = 10  # metadata below the model came with it
    model.producer_name, model.producer_version, model.domain, model.model_version = "maker", "1.2", "org.example", 7
    model.doc_string, graph.doc_string = "model text\nsecond line", "graph text"
    for owner, name in ((model, "model"), (graph, "graph")):
        owner.metadata_props.add(key=f"{name} key", value=f"{name} value")
        owner.metadata_props.add(key="a second one", value="")
    for position, item in enumerate(graph.node):
        item.doc_string = f"node text {position}"
        item.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', 'layer{position}']")
    for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        item.doc_string = f"text of {item.name}"
        item.metadata_props.add(key="value", value=item.name)
    graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.input[0].type.denotation = "TENSOR"
    note = graph.quantization_annotation.add(tensor_name="y")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="gain")


def leaves(message: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every set field as (path, value); elements with a name are known by it, and their order is a leaf as well.

    Metadata are a mapping, so their order counts for nothing.
    """
    for field, value in message.ListFields():
        here = f"{path}/{field.name}"
        if field.type != field.TYPE_MESSAGE:
            yield here, list(value) if repeated(value) else value
        elif not repeated(value):
            yield from leaves(value, here)
        else:
            keys = [key(item) or f"#{position}" for position, item in enumerate(value)]
            yield f"{here}/order", sorted(keys) if field.name == "metadata_props" else keys
            for item, name in zip(value, keys, strict=True):
                yield from leaves(item, f"{here}[{name}]")


def repeated(value: Any) -> bool:
    """Return True if a field holds a list."""
    return hasattr(value, "add") or hasattr(value, "append")


def key(item: Any) -> str:
    """Return the identity of an element."""
    if isinstance(item, onnx.NodeProto):
        return next(iter(item.output), "")
    return next((getattr(item, n) for n in ("name", "key", "domain", "tensor_name") if getattr(item, n, "")), "")


def differences(before: onnx.ModelProto, after: onnx.ModelProto) -> dict[str, tuple[Any, Any]]:
    """Path of every leaf that is not the same in both, with both values."""
    one, two = dict(leaves(before)), dict(leaves(after))
    return {path: (one.get(path), two.get(path)) for path in one | two if one.get(path) != two.get(path)}


def values(model: onnx.ModelProto) -> dict[str, bytes]:
    """Initializers as bytes of their arrays."""
    return {t.name: numpy_helper.to_array(t).tobytes() for t in model.graph.initializer}
