"""Embedded models without their later blocks: trained networks whose searches and roundings take a third of the time.

The last layer is fitted to the outputs of the whole network, so that outputs still depend on the inputs as they did.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from onnxgrail import models

CUTS = {  # the last tensor between blocks that stays, and the one that it stands for
    "digits_resnet": ("relu_4", "relu_6"),  # 2 of 3 blocks
    "digits_vit": ("add_173", "add_329"),  # 2 of 4 blocks
    "char_llama": ("add_729", "add_1311"),  # 2 of 4 blocks
}


def shorter(name: str, folder: Path) -> models.Embedded:
    """Write a shorter model into a folder, and return it with the data of the whole one."""
    path = folder / f"short_{name}.onnx"
    path.write_bytes(short(name))
    return dataclasses.replace(models.load(name), model=path)


@functools.cache
def short(name: str) -> bytes:
    """Return the bytes of a shorter model."""
    whole = models.load(name)
    model = onnx.load(whole.model)
    last, end = CUTS[name]
    for node in model.graph.node:
        for place, value in enumerate(node.input):
            node.input[place] = last if value == end else value
    _without_unused(model)
    with np.load(whole.calibration) as file:
        feed = {key: file[key][:128] for key in file.files}
    _fit_head(model, feed, _run(onnx.load(whole.model), feed))
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def _without_unused(model: onnx.ModelProto) -> None:
    graph = model.graph
    needed, nodes = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed |= set(node.input)
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, values in ((graph.node, nodes[::-1]), (graph.initializer, weights)):
        del field[:]  # type: ignore[attr-defined]
        field.extend(values)  # type: ignore[attr-defined]
    del graph.value_info[:]


def _fit_head(model: onnx.ModelProto, feed: Any, goal: Any) -> None:
    """Fit the weight and the bias of the last node by ridge regression."""
    head = model.graph.node[-1]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output[0].CopyFrom(helper.make_tensor_value_info(head.input[0], onnx.TensorProto.FLOAT, None))
    del probe.graph.node[-1]
    rows = _run(probe, feed)
    rows, goal = (array.reshape(-1, array.shape[-1]).astype(np.float64) for array in (rows, goal))
    if len(head.input) == 3:
        rows = np.c_[rows, np.ones(len(rows))]
    gram = rows.T @ rows
    found = np.linalg.solve(gram + 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram)), rows.T @ goal)
    fitted = {head.input[1]: found} if len(head.input) == 2 else {head.input[1]: found[:-1].T, head.input[2]: found[-1]}
    for tensor in model.graph.initializer:
        if tensor.name in fitted:
            array = np.ascontiguousarray(fitted[tensor.name], np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _run(model: onnx.ModelProto, feed: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(model.SerializeToString(), options).run(None, feed)[0]
