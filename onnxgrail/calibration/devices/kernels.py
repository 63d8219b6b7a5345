"""Small ONNX graphs that compute sums and copies of activations on the device, without a copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from onnxgrail.calibration.runtime.session import Session, Setup, open_session

OPSET, IR = 13, 8
KINDS = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(int64)": TensorProto.INT64,
}
SINGLE, DOUBLE, COUNTS = "tensor(float)", "tensor(double)", "tensor(int64)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The conversion of an activation to rows, as far as the graph depends on it; sizes are inputs of the graph.

    Attributes:
        kind: the activation's type in ONNX Runtime.
        picked: True if some channels are gathered, or all in another order.
        turned: True if channels are not the last axis, or have several positions each (flattened feature maps), which
            become rows.
        chosen: True if padded rows are left out.
        alone: True if only the squares of channels are summed, not their products.
    """

    kind: str
    picked: bool
    turned: bool
    chosen: bool
    alone: bool


class Kernels:
    """Sessions of these graphs, each opened on first use."""

    def __init__(self, providers: Sequence[str]) -> None:
        self._providers = tuple(providers)
        self._sessions: dict[tuple[Any, ...], Session] = {}

    def session(self, make: Callable[..., bytes], *choices: Any) -> Session:
        """Return the session of the graph that `make` builds from these choices."""
        key = (make, *choices)
        if key not in self._sessions:
            self._sessions[key] = open_session(make(*choices), Setup(providers=self._providers, optimise=False))
        return self._sessions[key]


def moments(rows: Rows) -> bytes:
    """Build a graph: of the rows (n, h) of `x`, sums, sums of squares, and products added to `before`, in float32.

    Its inputs are sizes and indices: `front` (lead, channels, trail) with `index`, `split` (lead, h, members, trail),
    `places` (positions, numbers in each) with `rows`, and `flat` (-1, h); and `ones` (n, 1).  Rows are gathered, not
    multiplied by 0, because padding may hold NaN.
    """
    inputs: dict[str, str] = {"x": rows.kind}
    steps: list[tuple[str, str, dict[str, Any]]] = []
    if rows.picked:
        inputs |= {"front": COUNTS, "index": COUNTS}
        steps += [("Reshape", "front", {}), ("Gather", "index", {"axis": 1})]
    if rows.turned:
        inputs |= {"split": COUNTS}
        steps += [("Reshape", "split", {}), ("Transpose", "", {"perm": [0, 3, 2, 1]})]
    if rows.chosen:
        inputs |= {"places": COUNTS, "rows": COUNTS}
        steps += [("Reshape", "places", {}), ("Gather", "rows", {"axis": 0})]
    steps += [("Reshape", "flat", {}), ("Cast", "", {"to": TensorProto.FLOAT})]
    nodes, last = [], "x"
    for number, (op, other, choices) in enumerate(steps):
        made = f"step{number}"
        nodes.append(helper.make_node(op, [last, other] if other else [last], [made], **choices))
        last = made
    nodes.append(helper.make_node("Gemm", ["ones", last], ["total"], transA=1))  # more accurate than ReduceSum
    inputs |= {"flat": COUNTS, "ones": SINGLE}
    outputs = dict.fromkeys(("total", "squares"), SINGLE)
    if rows.alone:
        nodes += [
            helper.make_node("Mul", [last, last], ["squared"]),
            helper.make_node("Gemm", ["ones", "squared"], ["squares"], transA=1),
        ]
    else:  # squares only tell if products are in the range of float32
        nodes += [
            helper.make_node("Gemm", [last, last, "before"], ["gram"], transA=1),
            helper.make_node("ReduceSumSquare", [last], ["squares"], axes=[0], keepdims=1),
        ]
        inputs, outputs = inputs | {"before": SINGLE}, outputs | {"gram": SINGLE}
    return _graph(nodes, inputs, outputs)


def widening() -> bytes:
    """Build a graph that adds a float32 matrix `part` to a float64 matrix."""
    nodes = [
        helper.make_node("Cast", ["part"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Add", ["wide", "before"], ["sum"]),
    ]
    return _graph(nodes, {"part": SINGLE, "before": DOUBLE}, {"sum": DOUBLE})


def copying(kind: str) -> bytes:
    """Build a graph that copies `x`."""
    return _graph([helper.make_node("Identity", ["x"], ["y"])], {"x": kind}, {"y": kind})


def picking(kind: str, axis: int) -> bytes:
    """Build a graph that gathers the positions `index` along an axis of `x`."""
    return _graph(
        [helper.make_node("Gather", ["x", "index"], ["y"], axis=axis)], {"x": kind, "index": COUNTS}, {"y": kind}
    )


def joining(kind: str, axis: int, count: int) -> bytes:
    """Build a graph that concatenates arrays `x0`, `x1` and so on."""
    names = [f"x{number}" for number in range(count)]
    return _graph([helper.make_node("Concat", names, ["y"], axis=axis)], dict.fromkeys(names, kind), {"y": kind})


def _graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, str],
    outputs: dict[str, str],
) -> bytes:
    """Build a model with tensors of these types and open shapes."""
    ends = [[helper.make_tensor_value_info(n, KINDS[kind], None) for n, kind in o.items()] for o in (inputs, outputs)]
    graph = helper.make_graph(nodes, "kernel", ends[0], ends[1])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    return bytes(model.SerializeToString())
