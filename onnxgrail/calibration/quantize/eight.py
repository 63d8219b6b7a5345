"""A model whose nodes compute in 8 bits, as ONNX Runtime's tool for static quantization writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.quantize.noise import last_values, upstream
from onnxgrail.calibration.quantize.placing import Placing
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.bits.exempt import exempted
from onnxgrail.graph.bits.folded import folded
from onnxgrail.graph.io.model_file import load

LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
ROUNDED = (*LAYERS, "Gather")
AFTER = ("Relu", "Clip")  # rounded too, or a layer's range would hold what they cut off
BETWEEN = (
    "Add",
    "AveragePool",
    "Concat",
    "Flatten",
    "GlobalAveragePool",
    "LeakyRelu",
    "MaxPool",
    "Mul",
    "Reshape",
    "Resize",
    "Sigmoid",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
)  # have kernels in 8 bits; between layers in 8 bits, those in float would cost two conversions
WHOLE = ("Conv", "ConvTranspose", *AFTER, *BETWEEN)  # have kernels that write integers only


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A prepared model.

    Attributes:
        path: its file; ready: the graph.
        loud: layers whose inputs have outliers, with that reason.
        never: layers that stay in float in any case, with the reason.
        plain: no other nodes get 8 bits.
    """

    path: Path
    ready: ir.Model
    loud: Mapping[str, str]
    never: Mapping[str, str]
    plain: bool = False

    def layers(self) -> list[ir.Node]:
        """Return the layers that can compute in 8 bits."""
        return [n for n in self.ready.graph if n.op_type in LAYERS and n.name not in self.never]

    def between(self) -> list[ir.Node]:
        """Return other nodes that have kernels in 8 bits, a layer in 8 bits after them, and one before every output.

        What reaches an output without a layer, such as scores that were joined with boxes, stays in float.
        """
        if self.plain:
            return []
        inputs = (value for layer in self.layers() for value in layer.inputs if value is not None)
        read, last = upstream(self.ready, inputs, lambda _: True), last_values(self.ready, LAYERS)
        found = (n for n in self.ready.graph if n.op_type in BETWEEN and not n.domain and n.outputs[0] in read)
        return [n for n in found if n.outputs[0].dtype == ir.DataType.FLOAT and not last.intersection(n.outputs)]

    def tables(self) -> list[ir.Node]:
        """Return the lookups in constant tables, which have 8 bits, too."""
        weights = self.ready.graph.initializers
        return [
            node
            for node in self.ready.graph
            if node.op_type == "Gather" and node.inputs[0] is not None and node.inputs[0].name in weights
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Eight:
    """A model whose nodes compute in 8 bits wherever that is possible, and in float where that is better.

    Attributes:
        origin: the float model.
        whole: the graph with 8 bits.
        placing: which nodes are better in float.
        kinds: operators of the nodes that can have 8 bits.
        shifts: of biases, by weight, for layers in float whose weights have 8 bits; None if they are stored as float32.
    """

    origin: Source
    whole: ir.Model
    placing: Placing
    kinds: Collection[str]
    shifts: Mapping[str, Floats] | None

    def in_float(self, names: Collection[str] = ()) -> list[ir.Node]:
        """Return the nodes with 8-bit kernels that compute in float if some, by name, have to."""
        found = self.placing.in_float(names)
        return [node for node in self.origin.ready.graph if node.op_type in self.kinds and node.name in found]

    def without(self, names: Collection[str] = ()) -> ir.Model:
        """Return the model in which some nodes compute in float, with those that are then better in float, too."""
        left = {node.name or "" for node in self.in_float(names)}
        whole = () if self.origin.plain else WHOLE
        made = exempted(self.whole, self.origin.ready, left, self.kinds, whole=whole)
        return made if self.shifts is None else folded(made, shifts=self.shifts)

    def layers(self, names: Collection[str] = ()) -> tuple[str, ...]:
        """Return the names of the layers that compute in float if some nodes have to."""
        return tuple(node.name or "" for node in self.in_float(names) if node.op_type in LAYERS)


def by_tool(
    origin: Source,
    feeds: Sequence[Feed],
    target: Path,
    *,
    without: Collection[str] = (),
    between: Collection[str] = (),
    symmetric: bool = False,
) -> ir.Model:
    """Write and return a model in which all layers but some are quantized, with ranges from the feeds.

    Args:
        origin: the float model.
        feeds: calibration data.
        target: the file.
        without: layers that stay in float.
        between: the other nodes that get 8 bits.
        symmetric: see `Static`.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next((dict(feed) for feed in self.left), None)

    tables = origin.tables()
    others = [
        node.name or ""
        for node in origin.ready.graph
        if (node.op_type == "Gather" and node not in tables) or (node.op_type in BETWEEN and node.name not in between)
    ]
    quantize_static(
        origin.path,
        target,
        Reader(),
        per_channel=True,
        # Weights of 7 bits: sums of 8-bit products saturate in the kernels of x86 processors without VNNI.
        reduce_range=not symmetric,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=[*ROUNDED, *AFTER, *(BETWEEN if between else ())],
        nodes_to_exclude=[*without, *others],
        # ONNX Runtime drops a Relu or Clip that rounding replaces by itself; a layer in float still needs it.
        extra_options={"ActivationSymmetric": symmetric, "QDQKeepRemovableActivations": True},
    )
    return load(target.read_bytes())
