"""Model to bytes for the runtime."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir


def to_bytes(model: ir.Model, outputs: Sequence[str] = ()) -> bytes:
    """Serialise, with further tensors as outputs; recorded shapes of intermediates are left out (they may be stale)."""
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    have = {o.name for o in proto.graph.output}
    for name in outputs:
        if name not in have:
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
    data: bytes = proto.SerializeToString()
    return data
