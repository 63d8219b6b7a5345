"""Nodes whose input is in a basis that a rotation chose, while a model is narrowed."""

from __future__ import annotations

import onnx_ir as ir

PLAIN = "SimplifiedLayerNormalization"  # ONNX Runtime's name for x / root mean square * gain
MARK = "onnxgrail.rotated"  # metadata key; the value names the rotated stream or table, or that of a norm inside heads
TURNED = "onnxgrail.turned"  # metadata key of a FusedMatMul that stands for a product with a transposed table
INSIDE = "onnxgrail.inside"  # metadata key of a norm inside heads; the value is the kind of its channels
READ = "onnxgrail.inside."  # followed by a kind: metadata key of what reads channels inside heads, a product or a fused
# kernel; the value names what was rotated
ORDER = "onnxgrail.order"  # metadata key of such a product; the value lists channels, the most important first
FUSED = "onnxgrail.fused"  # metadata key of a normalization inside heads; the value is the operator that it was
BRIDGE = "onnxgrail.bridge"  # metadata key of a matrix that takes the change of a basis; the value names the basis
LINEAR = "onnxgrail.linear"  # metadata key of a layer that reads a stream without normalizations; the value names it
RANK = "onnxgrail.rank"  # metadata key of the second of two convolutions that were one; the value names its weight
SECOND = "/rank"  # ending of the name of that one's weight, after the name of the first one's
CACHED = "onnxgrail.cache"  # metadata key of a node between a cache and heads; the value tells which cache
MADE = "onnxgrail.made"  # metadata key of a node that repeats or scales a constant to channels; it tells which one
MEAN = "onnxgrail.mean"  # metadata key of a product with equal weights that was a mean over channels
LEFT = "onnxgrail.left"  # metadata key of a mean or a normalization over the channels that stay
PICKED = "onnxgrail.picked"  # metadata key of a node that reads a table of positions for the channels that stay


def marks_of(node: ir.Node) -> dict[str, str]:
    """Return the marks of a node: all of its metadata that are not of the file."""
    return {key: text for key, text in node.metadata_props.items() if key.startswith("onnxgrail.")}


def is_cached(node: ir.Node) -> bool:
    """Return True for a node between a cache and heads."""
    return CACHED in node.metadata_props


def is_rotated(node: ir.Node) -> bool:
    """Return True for a normalization in an orthogonal basis that a rotation chose: it can lose channels."""
    return node.op_type == PLAIN and MARK in node.metadata_props
