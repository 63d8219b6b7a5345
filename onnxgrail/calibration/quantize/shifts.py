"""Measure by how much rounded weights shift the outputs of layers on average, so that biases can make up for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.bits.folded import Weight, added, rounded, weights_of
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.io.serial import pack

LARGEST = 2**30  # bytes of weights of a model to which the errors of its weights are added as layers


def shifts_of(model: ir.Model, feeds: Sequence[Feed]) -> dict[str, Floats]:
    """Return the mean error of every output channel by weight: with float weights minus with rounded ones.

    Every layer reads the inputs of the float model, so errors of earlier layers, which have biases too, do not count.

    Args:
        model: the float model.
        feeds: calibration data; without, no error is known.

    References:
        Markus Nagel, Mart van Baalen, Tijmen Blankevoort, Max Welling: Data-Free Quantization Through Weight
        Equalization and Bias Correction, 2019, arXiv:1906.04721.
    """
    if not feeds or weight_bytes(model) > LARGEST:
        return {}
    made = model.clone()
    names = [_errors(made.graph, weight) for weight in weights_of(made)]
    outputs = dict(filter(None, names))
    total = {weight: np.zeros(1) for weight in outputs}
    samples = dict.fromkeys(outputs, 0)
    if not outputs:
        return {}
    with open_session(pack(made, outputs=list(outputs.values())), Setup(once=True)) as session:
        for feed in feeds:
            results = session.run(feed)
            for weight, output in outputs.items():
                means = np.asarray(results[output], np.float64)
                total[weight] = total[weight] + means.reshape(*means.shape[:2]).sum(axis=0)
                samples[weight] += len(means)
    found = {weight: total[weight] / samples[weight] for weight in outputs if samples[weight]}
    return {weight: shift for weight, shift in found.items() if np.isfinite(shift).all()}


def _errors(graph: ir.Graph, weight: Weight) -> tuple[str, str] | None:
    """Add a layer that multiplies by the errors of a weight; return the weight's name, and the new mean per channel."""
    node = weight.layer()
    if node is None or node.graph is not graph:
        return None
    codes, scale = rounded(weight.array, weight.axes)
    name = f"{weight.name}/error"
    value = added(graph, weight.array - codes.astype(np.float32) * scale, f"{name}/weight")
    attributes = list(node.attributes.values())
    outputs = [(node.op_type, f"{name}/layer"), ("GlobalAveragePool", f"{name}/mean")]
    inputs: list[ir.Value | None] = [node.inputs[0], value]
    for op, output in outputs[: 1 if node.op_type == "Gemm" else 2]:
        made = ir.Node("", op, inputs, attributes)
        made.outputs[0].name, made.outputs[0].type = output, ir.TensorType(ir.DataType.FLOAT)
        graph.append(made)
        inputs, attributes, last = [made.outputs[0]], [], output
    return weight.name, last
