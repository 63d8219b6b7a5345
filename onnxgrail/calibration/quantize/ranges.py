"""Choose how far the ranges of activations are narrowed: a smaller range rounds finer, and cuts off more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.quantize.noise import last_values
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Feed, Floats
from onnxgrail.graph.bits.exempt import BACK, THERE
from onnxgrail.graph.bits.folded import added, appended
from onnxgrail.graph.bits.ranges import Range
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.io.serial import pack

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
NEAR = 1.1  # times the least error that a wider range may have: other samples have larger values
LARGEST = 2**30  # bytes of weights of a model that is run once more for every share
SHARE = "onnxgrail.share"  # the input by which ranges are multiplied, and the beginning of the names of errors


def shares_of(
    model: ir.Model, ranges: Iterable[Range], feeds: Sequence[Feed], layers: Collection[str]
) -> dict[str, float]:
    """Return the shares of ranges by the names of their scales: the largest whose squared error is near the least.

    Ranges that stay as they are, are left out.  So are those of activations with no layer between them and an output:
    the largest scores of a detector would all become the same.

    Args:
        model: the float model.
        ranges: of activations, from least and greatest values.
        feeds: calibration data; without, no error is known.
        layers: types of the nodes that are layers.
    """
    if not feeds or weight_bytes(model) > LARGEST:
        return {}
    made = model.clone()
    last = last_values(made, layers)
    values = {
        v.name: v for node in made.graph for v in (*node.inputs, *node.outputs) if v is not None and v not in last
    }
    share = ir.val(SHARE, ir.DataType.FLOAT, [])
    known = [one for one in ranges if one.tensor in values]
    names = [_error(made.graph, values[one.tensor], one, share) for one in known]
    if not names:
        return {}
    made.graph.inputs.append(share)
    errors = np.zeros((len(SHARES), len(names)))
    with open_session(pack(made, outputs=names), Setup(extended=False)) as session:
        for feed in feeds:
            for row, number in zip(errors, SHARES, strict=True):
                results = session.run({**feed, SHARE: np.array(number, np.float32)})
                row += [float(results[name]) for name in names]
    shares = {one: _share(column, one.least) for one, column in zip(known, errors.T, strict=True)}
    return {name: share for one, share in shares.items() if share < 1 for name in one.scales}


def _share(errors: Floats, least: float) -> float:
    """Return the largest share, of at least some number, whose error is near the smallest."""
    able = {share: error for share, error in zip(SHARES, errors, strict=True) if share >= least}
    return next((share for share, error in able.items() if error <= NEAR * min(able.values())), 1.0)


def _error(graph: ir.Graph, value: ir.Value, known: Range, share: ir.Value) -> str:
    """Round an activation with a share of its range; return the name of the sum of squared errors."""
    name = f"{SHARE}/{value.name}"

    def add(op: str, inputs: Sequence[ir.Value], attributes: Sequence[ir.Attr] = ()) -> ir.Value:
        return appended(graph, op, inputs, f"{name}/{op}", attributes)

    scale = add("Mul", [added(graph, known.scale, f"{name}/scale"), share])
    zero = added(graph, known.zero, f"{name}/zero")
    back = add(BACK, [add(THERE, [value, scale, zero]), scale, zero])
    return add("ReduceSumSquare", [add("Sub", [back, value])], [ir.AttrInt64("keepdims", 0)]).name or ""
