"""One run of the model with every intermediate as output: the facts that tracing rests on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.calibration.session import open_session
from onnxgrail.core import Array, Feed
from onnxgrail.graph.facts import Facts, constants
from onnxgrail.graph.serial import to_bytes

SMALL = 4096


def observe(model: ir.Model, feed: Feed) -> Facts:
    """Run the model once on `feed` and once on a shorter batch.

    Raises:
        ModelError: ONNX Runtime cannot load or run the model.
    """
    known = constants(model)
    names = [v.name for node in model.graph for v in node.outputs if v.name]
    everything = to_bytes(model, outputs=names)
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, np.dtype] = {}
    values: dict[str, Array] = {}
    with open_session(everything, optimise=False) as session:
        found = {**feed, **session.run(feed)}
        for name, array in found.items():
            if isinstance(array, np.ndarray):
                shapes[name], dtypes[name] = array.shape, array.dtype
                if name in known or (array.dtype.kind in "iub" and array.size <= SMALL):
                    values[name] = array
        varying = _varying(session, feed, shapes)
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            shapes[name] = tuple(int(d) for d in value.const_value.shape)
            dtypes[name] = value.const_value.dtype.numpy()
            if value.const_value.size <= SMALL:
                values[name] = value.const_value.numpy()
    return Facts(shapes, dtypes, values, known, varying)


def _varying(session: object, feed: Feed, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[int]]:
    """Axes whose size changes with the batch; empty when the batch cannot change."""
    batch = max((a.shape[0] for a in feed.values() if a.ndim), default=1)
    if batch < 2:
        return {}
    shorter = {n: a[: batch - 1] if a.ndim and a.shape[0] == batch else a for n, a in feed.items()}
    try:
        other = session.run(shorter)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  a fixed batch is no error here
        return {}
    found = {}
    for name, array in other.items():
        axes = frozenset(k for k, (a, b) in enumerate(zip(array.shape, shapes[name], strict=False)) if a != b)
        if axes:
            found[name] = axes
    return found
