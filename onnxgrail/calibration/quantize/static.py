"""Static quantization to 8 bits by ONNX Runtime's tool, and the layers that stay in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.quantize.choose import choose
from onnxgrail.calibration.quantize.noise import MIXED, exceptions
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.core import Feed
from onnxgrail.graph.bits.exempt import exempted
from onnxgrail.graph.io.model_file import load, save

LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
ROUNDED = (*LAYERS, "Gather")
AFTER = ("Relu", "Clip")  # rounded too, or a layer's range would hold what they cut off
GROUPED = "grouped transposed convolutions have no scale per channel"


@dataclass(frozen=True, slots=True)
class Trials:
    """Trials of layers in float: the loss of a candidate, and the loss that is small enough."""

    loss: Callable[[ir.Model], float]
    target: float

    def before(self, step: Callable[[ir.Model], ir.Model]) -> Trials:
        """Return trials of candidates to which a step is applied first."""
        return Trials(lambda model: self.loss(step(model)), self.target)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Static:
    """The inputs of static quantization.

    Attributes:
        feeds: calibration data.
        symmetric: use zero points of zero and signed activations, as TensorRT requires; unsigned is faster on a CPU.
        trials: measure which layers stay in float; without, those whose inputs have outliers do.
    """

    feeds: Sequence[Feed] = ()
    symmetric: bool = False
    trials: Trials | None = None


def quantise_static(source: Path, target: Path, given: Static) -> tuple[tuple[str, ...], str]:
    """Write the quantized model; return names of layers that stay in float, and the reason."""
    feeds, trials = given.feeds, given.trials
    first = target.with_name("prepared.onnx")
    prepare(source, first)
    ready = load(first.read_bytes())
    loud = exceptions(ready, feeds, LAYERS)
    never = {node.name or "": GROUPED for node in ready.graph if _grouped(node)}
    never |= {name: why for name, why in loud.items() if why == MIXED}  # a loss over all channels does not see it
    layers = {n.name or "": _size(n) for n in ready.graph if n.op_type in LAYERS and n.name not in never}
    if trials is None:
        kept = loud | never
        _quantise(first, ready, feeds, target, symmetric=given.symmetric, without=list(kept))
        return tuple(kept), "; ".join(dict.fromkeys(kept.values()))
    _quantise(first, ready, feeds, target, symmetric=given.symmetric, without=list(never))
    whole = load(target.read_bytes())

    def without(names: Collection[str]) -> ir.Model:
        return exempted(whole, ready, {*names, *never}, ROUNDED, AFTER)

    outliers = [name for name in loud if name in layers]
    found = choose(layers, lambda names: trials.loss(without(names)), target=trials.target, outliers=outliers)
    save(without(found.layers), target)
    why = (
        [f"the loss on calibration samples falls from {found.before:.2%} to {found.after:.2%}"] if found.layers else []
    )
    return (*found.layers, *never), "; ".join([*why, *dict.fromkeys(never.values())])


def _quantise(
    source: Path, ready: ir.Model, feeds: Sequence[Feed], target: Path, *, symmetric: bool, without: list[str]
) -> None:
    """Quantize all layers but some, with ranges from the feeds."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next((dict(feed) for feed in self.left), None)

    weights = ready.graph.initializers
    tables = [
        node.name or ""
        for node in ready.graph
        if node.op_type == "Gather" and (node.inputs[0] is None or node.inputs[0].name not in weights)
    ]
    quantize_static(
        source,
        target,
        Reader(),
        per_channel=True,
        # Weights of 7 bits: sums of 8-bit products saturate in the kernels of x86 processors without VNNI.
        reduce_range=not symmetric,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=[*ROUNDED, *AFTER],
        nodes_to_exclude=[*without, *tables],
        # ONNX Runtime drops a Relu or Clip that rounding replaces by itself; a layer in float still needs it.
        extra_options={"ActivationSymmetric": symmetric, "QDQKeepRemovableActivations": True},
    )


def _size(layer: ir.Node) -> int:
    """Return the number of a layer's weights, 0 if both of its inputs are computed."""
    weight = layer.inputs[1].const_value if layer.inputs[1] is not None else None
    return 0 if weight is None else weight.size


def _grouped(node: ir.Node) -> bool:
    """Return True for a grouped ConvTranspose, whose bias the tool scales as if every group were the whole."""
    return node.op_type == "ConvTranspose" and node.attributes.get_int("group", 1) > 1
