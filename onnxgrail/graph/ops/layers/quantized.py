"""Op rules of quantized graphs: integers with scales pass like floats; fused integer kernels are refused.

So are convolutions that ONNX Runtime has converted to a processor-specific layout.
"""

from __future__ import annotations

from onnxgrail.graph.attributes import MICROSOFT, NCHWC
from onnxgrail.graph.ops.layers.linear import linear
from onnxgrail.graph.ops.rule import narrow, refused, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

COMPRESS_FIRST = "its numbers are integers fused into the operator: compress the float model, then quantize it"
BLOCKED = "it is in ONNX Runtime's own blocked layout: compress the file before optimizing it offline"
ONE_RANGE = "dynamic quantization takes one range over all channels: compress the float model, then quantize it"
WEIGHTS = {  # op -> operand that holds the weight, axis of its outputs
    "QLinearConv": (3, 0),
    "QLinearMatMul": (3, 1),
    "QGemm": (3, 0),
    "MatMulInteger": (1, 1),
    "ConvInteger": (1, 0),
    "DynamicQuantizeMatMul": (1, 1),
    "MatMulIntegerToFloat": (1, 1),
    "QAttention": (1, 1),
}


@rule("QuantizeLinear", "DequantizeLinear")
@rule("QuantizeLinear", "DequantizeLinear", domain=MICROSOFT)
def quantise(site: Site) -> None:
    """Pass unchanged; cut scales and zero points per channel."""
    shape = site.shape(0)
    scale = site.shape(1)
    axis = int(site.attribute("axis", 1)) % max(len(shape), 1)
    if len(scale) > 1 or any(not site.is_constant(k) for k in site.operands[1:]):
        site.freeze(site.marks(0), "its scale is computed at run time or differs from block to block")
        return
    for mark in site.marks(0):
        if scale and scale[0] > 1 and axis in mark.axes:
            labels = site.collapse(mark, axis)
            for k in site.operands[1:]:
                site.carry(k, Mark((0,), labels))
    site.emit(site.marks(0))


@rule("MatMulNBits", domain=MICROSOFT)
def packed_matmul(site: Site) -> None:
    """Pass as MatMul; inputs are removed in whole blocks that share a scale."""
    if site.name(4) or site.source(1) not in site.flow.facts.stored:
        site.freeze(site.marks(0), "its weight is reordered, computed at run time or packed in an unknown way")
        return
    linear(site, inward=1, outward=0, bias=5)


@narrow("MatMulNBits", domain=MICROSOFT)
def narrow_packed_matmul(cut: Cut) -> None:
    """Update the two widths."""
    for attribute, name in (("K", cut.input_name(0)), ("N", cut.output_name())):
        stays = cut.alive(name).get(len(cut.shape(name)) - 1)
        if stays is not None:
            cut.set_int(attribute, int(stays.sum()))


refused("DynamicQuantizeLinear", why=ONE_RANGE, told="Refuse: one range is computed over all channels.")


@rule("QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger")
@rule(
    "QGemm", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention",
    domain=MICROSOFT,
)  # fmt: skip
def fused_kernel(site: Site) -> None:
    """Refuse: an integer kernel with built-in weights."""
    operand, axis = WEIGHTS[site.node.op_type]
    reason = ONE_RANGE if "Integer" in site.node.op_type or "Dynamic" in site.node.op_type else COMPRESS_FIRST
    _told(site, operand, axis, reason)


@rule("Conv", domain=NCHWC)
@rule("NhwcConv", "NhwcFusedConv", domain=MICROSOFT)
def blocked_conv(site: Site) -> None:
    """Refuse: its weight has a processor-specific layout."""
    _told(site, 1, 0, BLOCKED)


refused(
    "ReorderInput", "ReorderOutput", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample",
    why=BLOCKED, told="Refuse: channels are stored in blocks of a processor-specific size.", domain=NCHWC,
)  # fmt: skip


def _told(site: Site, operand: int, axis: int, reason: str) -> None:
    """Refuse, and report the weight, whose outputs lie on this axis."""
    site.refuse(reason)
    if site.is_constant(operand) and len(site.shape(operand)) > axis:
        labels = site.weight(operand, axis)
        site.carry(operand, Mark((axis,), labels), "producer")
        site.freeze([Mark((axis,), labels)], reason)


refused(
    "QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearGlobalAveragePool",
    "QLinearAveragePool", "QLinearConcat", "QLinearWhere",
    why=COMPRESS_FIRST, told="Refuse: integers with their own scales.", domain=MICROSOFT,
)  # fmt: skip
