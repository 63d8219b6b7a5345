"""Read mixture-of-experts nodes of ONNX Runtime: MoE, and QMoE with quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.attributes import integer, name_of, number, text

MIXTURES = frozenset({"MoE", "QMoE"})
INPUT, ROUTER = 0, 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """The positions of a stack of matrices among a node's inputs; -1 for inputs that the op does not have."""

    weight: int
    scale: int
    bias: int
    zero: int


STACKS: Mapping[str, tuple[Matrix, Matrix, Matrix]] = {  # up projection, down projection, gate
    "MoE": (Matrix(2, -1, 3, -1), Matrix(4, -1, 5, -1), Matrix(6, -1, 7, -1)),
    "QMoE": (Matrix(2, 3, 4, 11), Matrix(5, 6, 7, 12), Matrix(8, 9, 10, 13)),
}
BITS = ("fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits")
BEYOND = 15  # first of the inputs for floating-point quantization


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The configuration of a MoE or QMoE node.

    Attributes:
        up, down, gate: its weight stacks; the gate's inputs may be absent.
        activation: as named by the op; alpha, beta, limit: parameters of a gated activation.
        top: experts per token; normalised: their routing weights add up to one.
        interleaved: rows of a fused gate alternate with the gated rows, else they follow all of them.
        bits: bits per weight of each stack; size: weights per scale, 0 for whole rows.
    """

    up: Matrix
    down: Matrix
    gate: Matrix
    activation: str
    alpha: float
    beta: float
    limit: float
    top: int
    normalised: bool
    interleaved: bool
    bits: tuple[int, int, int]
    size: int


def mixture_of(node: ir.Node) -> Mixture:
    """Return the configuration of a MoE or QMoE node."""
    up, down, gate = STACKS[node.op_type]
    packed = node.op_type == "QMoE"
    common = integer(node, "expert_weight_bits", 4) if packed else 0
    return Mixture(
        up=up,
        down=down,
        gate=gate,
        activation=text(node, "activation_type", "relu"),
        alpha=number(node, "activation_alpha", 1.0),
        beta=number(node, "activation_beta", 0.0),
        limit=number(node, "swiglu_limit", float("inf")),
        top=integer(node, "k", 1),
        normalised=packed or bool(integer(node, "normalize_routing_weights")),
        interleaved=integer(node, "swiglu_fusion") == 1,
        bits=(*(integer(node, name, common) for name in BITS),),  # type: ignore[arg-type]
        size=integer(node, "block_size"),
    )


def is_plain(node: ir.Node) -> bool:
    """Return True if the weights are floats or integers with scales, and activations are not scaled."""
    kind = text(node, "quant_type", "int")
    return kind == "int" and not any(name_of(node, k) for k in range(BEYOND, len(node.inputs)))
