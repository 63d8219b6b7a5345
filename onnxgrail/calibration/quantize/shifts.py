"""Measure by how much rounding shifts the outputs of layers on average, so that biases can make up for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.attributes import BIASED, numbers_of
from onnxgrail.graph.bits.folded import Weight, added, appended, rounded, weights_of
from onnxgrail.graph.bits.ranges import biases_of
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
    return _means(made, dict(filter(None, names)), feeds)


def shifts_in_8_bits(model: ir.Model, whole: ir.Model, feeds: Sequence[Feed]) -> dict[str, Floats]:
    """Return the mean error of every output channel by layer: in float minus in 8 bits.

    Every layer in 8 bits reads the rounded inputs of the float model, see `shifts_of`.

    Args:
        model: the float model.
        whole: the model with `QuantizeLinear` and `DequantizeLinear` around its layers.
        feeds: calibration data; without, no error is known.
    """
    if not feeds or weight_bytes(model) > LARGEST:
        return {}
    made = model.clone()
    nodes = {node.name: node for node in made.graph}
    values = {
        value.name: value for value in (*made.graph.inputs, *(v for node in nodes.values() for v in node.outputs))
    }
    outputs = {}
    for bias in biases_of(whole):
        node = nodes.get(bias.layer.name)
        if node is not None and node.op_type in BIASED:
            outputs[node.name or ""] = _in_8_bits(made.graph, node, bias.layer, values)
    return _means(made, outputs, feeds)


def _means(model: ir.Model, outputs: Mapping[str, str], feeds: Sequence[Feed]) -> dict[str, Floats]:
    """Return the mean of outputs (samples, channels, ...) over all samples, without those that are not finite."""
    total = {name: np.zeros(1) for name in outputs}
    samples = dict.fromkeys(outputs, 0)
    if not outputs:
        return {}
    with open_session(pack(model, outputs=list(outputs.values())), Setup(once=True)) as session:
        for feed in feeds:
            results = session.run(feed)
            for name, output in outputs.items():
                means = np.asarray(results[output], np.float64)
                total[name] = total[name] + means.reshape(*means.shape[:2]).sum(axis=0)
                samples[name] += len(means)
    found = {name: total[name] / samples[name] for name in outputs if samples[name]}
    return {name: shift for name, shift in found.items() if np.isfinite(shift).all()}


def _in_8_bits(graph: ir.Graph, node: ir.Node, layer: ir.Node, values: Mapping[str | None, ir.Value]) -> str:
    """Add a copy of a layer in 8 bits beside the one in float; return the name of their mean difference per channel."""
    name = f"{node.name}/eight"

    def add(op: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr] = ()) -> ir.Value:
        return appended(graph, op, inputs, f"{name}/{len(graph)}", attributes)

    def copied(value: ir.Value | None) -> ir.Value | None:
        if value is None or value.name in values:
            return None if value is None else values[value.name]
        maker = value.producer()
        if maker is None or value.const_value is not None:
            return added(graph, numbers_of(value), f"{name}/constant/{len(graph.initializers)}")
        return add(maker.op_type, [copied(given) for given in maker.inputs], maker.attributes.values())

    eight = add(layer.op_type, [copied(value) for value in layer.inputs], layer.attributes.values())
    error = add("Sub", [node.outputs[0], eight])
    return (error if node.op_type == "Gemm" else add("GlobalAveragePool", [error])).name or ""


def _errors(graph: ir.Graph, weight: Weight) -> tuple[str, str] | None:
    """Add a layer that multiplies by the errors of a weight; return the weight's name, and the new mean per channel."""
    node = weight.layer()
    if node is None or node.graph is not graph:
        return None
    codes, scale = rounded(weight.array, weight.axes)
    name = f"{weight.name}/error"
    inputs = [node.inputs[0], added(graph, weight.array - codes.astype(np.float32) * scale, f"{name}/weight")]
    if gemm := node.op_type == "Gemm":  # which needs a bias before opset 11
        inputs.append(added(graph, np.zeros(1, np.float32), f"{name}/bias"))
    last = appended(graph, node.op_type, inputs, f"{name}/layer", node.attributes.values())
    if not gemm:
        last = appended(graph, "GlobalAveragePool", [last], f"{name}/mean")
    return weight.name, last.name or ""
