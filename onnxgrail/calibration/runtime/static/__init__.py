"""Static quantization to 8 bits by ONNX Runtime's tool: what it gets, and which layers stay in float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.runtime.static.noise import exceptions
from onnxgrail.calibration.runtime.static.prepare import prepare
from onnxgrail.core import Feed
from onnxgrail.graph.io.model_file import load

LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
GROUPED = "grouped transposed convolutions have no scale per channel"


def quantise_static(source: Path, feeds: list[Feed], target: Path, *, symmetric: bool) -> tuple[tuple[str, ...], str]:
    """Write the statically quantized model; return names of layers that stay in float, and the reason."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next((dict(feed) for feed in self.left), None)

    first = target.with_name("prepared.onnx")
    prepare(source, first)
    ready = load(first.read_bytes())
    loud = exceptions(ready, feeds, LAYERS) | {node.name or "": GROUPED for node in ready.graph if _grouped(node)}
    weights = ready.graph.initializers
    tables = [
        node.name or ""
        for node in ready.graph
        if node.op_type == "Gather" and (node.inputs[0] is None or node.inputs[0].name not in weights)
    ]
    quantize_static(
        first,
        target,
        Reader(),
        per_channel=True,
        # Weights of 7 bits: sums of 8-bit products saturate in the kernels of x86 processors without VNNI.
        reduce_range=not symmetric,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=[*LAYERS, "Gather"],
        nodes_to_exclude=[*loud, *tables],
        extra_options={"ActivationSymmetric": symmetric},
    )
    return tuple(loud), "; ".join(dict.fromkeys(loud.values()))


def _grouped(node: ir.Node) -> bool:
    """Return True for a grouped ConvTranspose, whose bias the tool scales as if every group were the whole."""
    return node.op_type == "ConvTranspose" and node.attributes.get_int("group", 1) > 1
