"""Refuse convolutions that ONNX Runtime has converted to a processor-specific layout, and report their weights."""

from __future__ import annotations

from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.ops.rule import refused, rule
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

BLOCKED = "it is in ONNX Runtime's own blocked layout: compress the file before optimising it offline"
NCHWC = "com.microsoft.nchwc"


@rule("Conv", domain=NCHWC)
@rule("NhwcConv", "NhwcFusedConv", domain=MICROSOFT)
def blocked_conv(site: Site) -> None:
    """Refuse: its weight has a processor-specific layout."""
    site.refuse(BLOCKED)
    if site.is_constant(1):
        labels = site.weight(1, 0)
        site.carry(1, Mark((0,), labels), "producer")
        site.freeze([Mark((0,), labels)], BLOCKED)


refused(
    "ReorderInput", "ReorderOutput", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool", "Upsample",
    why=BLOCKED, told="Refuse: channels are stored in blocks of a processor-specific size.", domain=NCHWC,
)  # fmt: skip
