"""Find nodes whose numbers are too large for half precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Array, Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.bits.folded import appended
from onnxgrail.graph.io.serial import pack

LARGE = 2.0**14  # a quarter of the largest number in half precision: other samples have larger ones
CUT = 1e4  # the tool of ONNX Runtime makes larger weights as small as this
ENDLESS = 1e30  # numbers from which on they only tell what is left out, as masks of attention do
LARGEST = "onnxgrail.largest/"  # in front of the name of a tensor


def overflowing(
    model: ir.Model, floats: Collection[str], feeds: Sequence[Feed], providers: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of nodes that read or write numbers beyond half precision.

    Args:
        model: the model in float32.
        floats: names of its tensors of this type.
        feeds: some of the data.
        providers: execution providers.
    """
    weights = {name: v.const_value for name, v in model.graph.initializers.items() if v.const_value is not None}
    large = {name for name, weight in weights.items() if _above(weight.numpy(), CUT)}
    large |= {name for feed in feeds for name, array in feed.items() if _above(array, LARGE)}
    made = model.clone()
    values = [v for node in list(made.graph) for v in node.outputs if v.name in floats]
    names = [_largest(made.graph, value) for value in values]
    try:
        with open_session(pack(made, outputs=names), Setup(providers=tuple(providers), extended=False)) as session:
            for feed in feeds:
                found = session.run(feed)
                large |= {name.removeprefix(LARGEST) for name in names if _above(found[name], LARGE)}
    except ModelError:  # a kernel that ONNX Runtime lacks
        return ()
    return tuple(
        node.name
        for node in model.graph
        if node.name and not large.isdisjoint(v.name for v in (*node.inputs, *node.outputs) if v is not None)
    )


def _largest(graph: ir.Graph, value: ir.Value) -> str:
    """Add the largest absolute number of a tensor to a graph; return its name."""
    name = f"{LARGEST}{value.name}"
    sizes = appended(graph, "Abs", [value], f"{name}/Abs")
    return appended(graph, "ReduceMax", [sizes], name, [ir.AttrInt64("keepdims", 0)]).name or ""


def _above(array: Array, limit: float) -> bool:
    """Return True if an array holds finite numbers beyond a limit, but for those of masks."""
    if array.dtype.kind != "f" or not array.size:
        return False
    sizes = np.abs(array[np.isfinite(array)])
    return bool(((sizes > limit) & (sizes < ENDLESS)).any())
