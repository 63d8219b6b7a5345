"""Mutations that are set as traps: graphs that ask for terabytes, nest deeply, call themselves or point elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper

from tests.mutation.protos import pick

Rng = np.random.Generator
CANARY = np.float32(12345.678)  # what stands in a file that no model may reach


def huge(model: ModelProto, rng: Rng) -> None:
    """A node in front asks for a tensor that fits nowhere, or for very many rounds."""
    size = int(rng.choice([2**20, 2**31, 2**34, 2**40, 2**62]))
    shape = [size] if rng.random() < 0.5 else [int(size**0.5)] * 2
    name = model.graph.node[0].input[0]
    made = helper.make_tensor("big_shape", TensorProto.INT64, [len(shape)], shape)
    kinds = {
        "ConstantOfShape": [helper.make_node("ConstantOfShape", ["big_shape"], ["big"])],
        "Expand": [
            helper.make_node("ReduceMax", [name], ["big_one"], keepdims=0),
            helper.make_node("Expand", ["big_one", "big_shape"], ["big"]),
        ],
        "RandomNormal": [helper.make_node("RandomNormal", [], ["big"], shape=shape)],
        "Range": [
            helper.make_node("Constant", [], ["big_0"], value_int=0),
            helper.make_node("Constant", [], ["big_1"], value_int=1),
            helper.make_node("Constant", [], ["big_n"], value_int=size),
            helper.make_node("Range", ["big_0", "big_n", "big_1"], ["big_r"]),
            helper.make_node("Cast", ["big_r"], ["big"], to=TensorProto.FLOAT),
        ],
    }
    found = [
        *pick(kinds.values(), rng),
        helper.make_node("ReduceMax", ["big"], ["big_top"], keepdims=0),
        helper.make_node("Add", [name, "big_top"], ["big_sum"]),
    ]
    model.graph.initializer.append(made)
    model.graph.node[0].input[0] = "big_sum"
    rest = [onnx.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend([*found, *rest])


def nested(model: ModelProto, rng: Rng) -> None:
    """Bodies in bodies in bodies."""
    depth = int(rng.choice([2, 10, 20, 30, 200]))
    name = model.graph.node[0].input[0]
    leaf = helper.make_graph(
        [helper.make_node("Identity", [name], ["leaf"])], "leaf", [], [helper.make_empty_tensor_value_info("leaf")]
    )
    for level in range(depth):
        flag = helper.make_node(
            "Constant", [], [f"flag{level}"], value=helper.make_tensor("t", TensorProto.BOOL, [], [1])
        )
        node = helper.make_node("If", [f"flag{level}"], [f"out{level}"], then_branch=leaf, else_branch=GraphProto())
        node.attribute[1 if node.attribute[1].name == "else_branch" else 0].g.CopyFrom(_copy(name, level))
        out = helper.make_empty_tensor_value_info(f"out{level}")
        leaf = helper.make_graph([flag, node], f"level{level}", [], [out])
    for node in leaf.node:
        model.graph.node.append(node)
    model.graph.node[-1].output[0] = "unused"


def _copy(name: str, level: int) -> GraphProto:
    out = helper.make_empty_tensor_value_info(f"else{level}")
    return helper.make_graph([helper.make_node("Identity", [name], [f"else{level}"])], "else", [], [out])


def recursive(model: ModelProto, rng: Rng) -> None:
    """A function calls itself, or two call each other; or many call each other twice."""
    count = int(rng.choice([1, 2, 24]))
    for k in range(count):
        target = f"f{(k + 1) % count}" if count < 3 or k + 1 < count else "last"
        calls = [
            helper.make_node(target, ["a"], ["b"], domain="deep"),
            helper.make_node(target, ["b"], ["c"], domain="deep"),
        ]
        if target == "last":
            calls = [helper.make_node("Relu", ["a"], ["c"])]
        model.functions.append(
            helper.make_function("deep", f"f{k}", ["a"], ["c"], calls, [helper.make_opsetid("", 20), _deep()])
        )
    model.opset_import.append(_deep())
    name = model.graph.node[-1].output[0]
    model.graph.node[-1].output[0] = "before_call"
    model.graph.node.append(helper.make_node("f0", ["before_call"], [name], domain="deep"))


def _deep() -> onnx.OperatorSetIdProto:
    return helper.make_opsetid("deep", 1)


def wide(model: ModelProto, rng: Rng) -> None:
    """Thousands of nodes in a row, or very many readers of one value."""
    count = int(rng.choice([500, 3000]))
    name = model.graph.node[-1].output[0]
    model.graph.node[-1].output[0] = "step_0"
    chain = rng.random() < 0.7
    for k in range(count):
        model.graph.node.add(op_type="Relu", input=[f"step_{k if chain else 0}"], output=[f"step_{k + 1}"])
    model.graph.node.add(op_type="Relu", input=[f"step_{count}"], output=[name])


TRAPS = (huge, nested, recursive, wide)


# ------------------------------------------------------------------------------------------------------ external data


def external(model: ModelProto, folder: Path, rng: Rng) -> None:
    """Weights beside the file, with something wrong about one of them; a file outside waits to be read."""
    data = b""
    for tensor in model.graph.initializer:
        raw = onnx.numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("float_data")
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
        tensor.ClearField("raw_data")
        _refer(tensor, "m.data", str(len(data)), str(len(raw)))
        data += raw
    outside = folder.parent / "outside.data"
    outside.write_bytes(np.full(4096, CANARY).tobytes())
    (folder / "m.data").write_bytes(data if rng.random() < 0.9 else data[: int(rng.integers(len(data)))])
    tensor = pick(model.graph.initializer, rng)
    size = len(onnx.TensorProto.FromString(tensor.SerializeToString()).external_data[2].value)
    places = ("../outside.data", str(outside), "sub/../../outside.data", "", ".", "..", "/", "/dev/zero",
              "/proc/self/mem", "m.data\x00", "n" * 5000, "link.data", "loop.data", "linked/outside.data",
              "名.data", "m.onnx", "d.npz", "..\\outside.data", "file:///etc/passwd", "pipe.data")  # fmt: skip
    numbers = ("-1", "0", "1", "7", "", "x", "1e3", "9" * 30, str(2**63), str(2**62), "٣", " 0", "0x10", str(size))
    action = rng.random()
    if action < 0.6:
        _refer(tensor, pick(places, rng), "0", None if rng.random() < 0.5 else tensor.external_data[2].value)
    elif action < 0.8:
        _refer(tensor, "m.data", pick(numbers, rng), tensor.external_data[2].value)
    elif action < 0.95:
        _refer(tensor, "m.data", tensor.external_data[1].value, pick(numbers, rng))
    else:
        del tensor.external_data[int(rng.integers(len(tensor.external_data)))]
    os.mkfifo(folder / "pipe.data")
    (folder / "link.data").symlink_to(outside)
    (folder / "loop.data").symlink_to(folder / "loop.data")
    (folder / "linked").symlink_to(folder.parent)


def _refer(tensor: TensorProto, location: str, offset: str, length: str | None) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=value)
