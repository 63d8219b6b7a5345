"""Small graphs that ONNX Runtime runs beside the network, on activations that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import TensorProto, helper

from onnxgrail.calibration.runtime.session import Session, open_session

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
    """How an activation becomes rows, as far as the graph depends on it; sizes are fed.

    Attributes:
        kind: ONNX Runtime's word for its type.
        picked: some channels, or all in another order.
        turned: the channels are not the last axis, or positions of a unit give rows of their own.
        chosen: padding is left out.
    """

    kind: str
    picked: bool
    turned: bool
    chosen: bool


class Kernels:
    """Sessions of such graphs, each opened when it is first wanted."""

    def __init__(self, providers: Sequence[str]) -> None:
        self._providers = tuple(providers)
        self._sessions: dict[tuple[Any, ...], Session] = {}

    def session(self, make: Callable[..., bytes], *choices: Any) -> Session:
        """The session of the graph that `make` builds of these choices."""
        key = (make, *choices)
        if key not in self._sessions:
            self._sessions[key] = open_session(make(*choices), providers=self._providers, optimise=False)
        return self._sessions[key]


def moments(rows: Rows) -> bytes:
    """Of the rows (n, h) of `x`: products on top of those `before`, sums, and sums of squares, in float32.

    Fed are the sizes of what is gathered from or turned, and which: `front` (lead, channels, trail) with `index`,
    `split` (lead, h, members, trail), `places` (positions, numbers in each) with `rows`, and `flat` (-1, h); and `ones`
    (n, 1).  Rows are gathered, not multiplied by 0: padding may hold NaN.
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
    nodes += [
        helper.make_node("Gemm", [last, last, "before"], ["gram"], transA=1),
        helper.make_node("Gemm", ["ones", last], ["total"], transA=1),  # a product is more exact than ReduceSum
        helper.make_node("ReduceSumSquare", [last], ["squares"], axes=[0], keepdims=0),
    ]
    outputs = dict.fromkeys(("gram", "total", "squares"), SINGLE)
    return _graph(nodes, {**inputs, "flat": COUNTS, "ones": SINGLE, "before": SINGLE}, outputs)


def widening() -> bytes:
    """A float32 matrix `part` on top of a float64 one."""
    nodes = [
        helper.make_node("Cast", ["part"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Add", ["wide", "before"], ["sum"]),
    ]
    return _graph(nodes, {"part": SINGLE, "before": DOUBLE}, {"sum": DOUBLE})


def copying(kind: str) -> bytes:
    """`x` in memory of its own."""
    return _graph([helper.make_node("Identity", ["x"], ["y"])], {"x": kind}, {"y": kind})


def picking(kind: str, axis: int) -> bytes:
    """Positions `index` of an axis of `x`."""
    return _graph(
        [helper.make_node("Gather", ["x", "index"], ["y"], axis=axis)], {"x": kind, "index": COUNTS}, {"y": kind}
    )


def joining(kind: str, axis: int, count: int) -> bytes:
    """Arrays `x0`, `x1` and so on behind each other."""
    names = [f"x{number}" for number in range(count)]
    return _graph([helper.make_node("Concat", names, ["y"], axis=axis)], dict.fromkeys(names, kind), {"y": kind})


def _graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, str],
    outputs: dict[str, str],
) -> bytes:
    """A model of tensors of these types, whose shapes stay open."""
    ends = [[helper.make_tensor_value_info(n, KINDS[kind], None) for n, kind in o.items()] for o in (inputs, outputs)]
    graph = helper.make_graph(nodes, "kernel", ends[0], ends[1])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    return bytes(model.SerializeToString())
