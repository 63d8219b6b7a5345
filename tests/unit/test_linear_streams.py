"""Linear bottlenecks in another basis: the same function, narrowing as a projection, and what is no such stream."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.algebra.rotation import basis_of_layers
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Array, Floats
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.rotate.marked import LINEAR
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace
from tests.oracle import check_same, run
from tests.tiny import Weights, feed, tiny
from tests.turned import without

WIDTH, INSIDE, KEPT = 8, 12, 5
BLOCK = """
e$i = Conv(h$i, we$i, be$i)
r$i = Relu(e$i)
d$i = Conv<group=12, pads=[1,1,1,1]>(r$i, wd$i)
q$i = Relu(d$i)
p$i = Conv(q$i, wp$i, bp$i)
"""
ENDS = {
    "one tap": ("y = Conv(h2, wo)", (4, WIDTH, 1, 1)),
    "several taps": ("y = Conv<pads=[1,1,1,1], strides=[2,2]>(h2, wo, bo)", (4, WIDTH, 3, 3)),
    "pooled": ("g = GlobalAveragePool(h2)\nf = Flatten(g)\ny = Gemm<transB=1>(f, wo, bo)", (4, WIDTH)),
    "channels last": ("t = Transpose<perm=[0,2,3,1]>(h2)\ny = MatMul(t, wo)", (WIDTH, 4)),
}


def bottlenecks(end: str = "one tap", begin: str = "h0 = Conv(x, wi, bi)", **more: tuple[int, ...] | Array) -> ir.Model:
    """A stream of two inverted residual blocks."""
    body = [begin]
    weights: dict[str, tuple[int, ...] | Array] = {"wi": (WIDTH, 3, 1, 1), "bi": (WIDTH,), "bo": (4,)}
    for i in range(2):
        body += [BLOCK.replace("$i", str(i)), f"h{i + 1} = Add(h{i}, p{i})"]
        weights |= {f"we{i}": (INSIDE, WIDTH, 1, 1), f"be{i}": (INSIDE,), f"wd{i}": (INSIDE, 1, 3, 3)}
        weights |= {f"wp{i}": (WIDTH, INSIDE, 1, 1), f"bp{i}": (WIDTH,)}
    text, shape = ENDS[end]
    weights = {**weights, "wo": shape, **more}
    read = {name: weight for name, weight in weights.items() if name in " ".join([*body, text])}
    return tiny("float[2,3,6,6] x => float[] y", "\n".join([*body, text]), read)


def found_in(model: ir.Model) -> Rotatable:
    """The streams of a model."""
    return rotatable(model, observe(model, feed(model)), ("stream",))


def turned(model: ir.Model, basis: Floats) -> tuple[ir.Model, Survey]:
    """The model with its stream in another basis, and its trace."""
    found = found_in(model)
    assert len(found.streams) == 1
    other = rotate(found, dict.fromkeys(found.streams, basis))
    return other, trace(other, observe(other, feed(other)))


def projected(model: ir.Model, projection: Floats) -> ir.Model:
    """The model in which all layers that read the stream read a projection."""
    found = found_in(model)
    (stream,) = found.streams.values()
    for number, slot in enumerate(slot for slot in stream.slots if slot.reads):
        value = slot.node.inputs[0]
        assert value is not None
        channels = stream.tensors[value][0] != len(found.facts.shapes[value.name or ""]) - 1
        matrix = projection.T[..., None, None] if channels else projection
        numbers = ir.tensor(np.ascontiguousarray(matrix, np.float32), name=f"projection{number}")
        weight = ir.Value(name=numbers.name, const_value=numbers)
        found.model.graph.register_initializer(weight)
        node = ir.Node("", "Conv" if channels else "MatMul", [value, weight], num_outputs=1)
        node.outputs[0].name = f"projected{number}"
        found.model.graph.insert_before(slot.node, node)
        slot.node.replace_input_with(0, node.outputs[0])
    return found.model


def invertible(width: int = WIDTH) -> Floats:
    """A random matrix that is far from orthogonal."""
    return np.random.default_rng(1).normal(size=(width, width)) + 2 * np.eye(width)


@pytest.mark.parametrize("end", ENDS)
def test_another_basis_is_the_same_function(end: str) -> None:
    model = bottlenecks(end)
    other, survey = turned(model, invertible())
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert [block.units for block in survey.blocks if block.ranked] == [WIDTH]


@pytest.mark.parametrize("end", ENDS)
def test_fewer_channels_are_a_projection(end: str) -> None:
    model, basis = bottlenecks(end), invertible()
    slim = without(*turned(model, basis), KEPT)
    want = run(projected(model, basis[:, :KEPT] @ np.linalg.inv(basis)[:KEPT]), feed(model))
    check_same(run(slim, feed(model)), want)
    assert np.abs(want["y"] - run(model, feed(model))["y"]).max() > 1e-2


WRITER = "g1 = Conv(q1, wp1{bias})\np1 = BatchNormalization(g1, s, t, m, v)"
SUM = "c = MatMul(x, w)\ng = Add(c, b)"
STATISTICS: Weights = {"s": (WIDTH,), "t": (WIDTH,), "m": (WIDTH,), "v": np.linspace(0.5, 2, WIDTH, dtype=np.float32)}


def normalized(bias: str) -> ir.Model:
    """The model with a batch normalization of what a layer writes into the stream."""
    block = BLOCK.replace("p$i = Conv(q$i, wp$i, bp$i)", WRITER.format(bias=bias)).replace("$i", "1")
    first = BLOCK.replace("$i", "0")
    body = "\n".join(["h0 = Conv(x, wi, bi)", first, "h1 = Add(h0, p0)", block, "h2 = Add(h1, p1)", ENDS["one tap"][0]])
    weights = {v.name: v.const_value.numpy() for v in bottlenecks().graph.initializers.values()}
    read = {name: array for name, array in weights.items() if name in body}
    return tiny("float[2,3,6,6] x => float[] y", body, {**read, **STATISTICS})


@pytest.mark.parametrize("bias", ["", ", bp1"])
def test_a_batch_normalization_goes_into_the_layer_before_it(bias: str) -> None:
    model = normalized(bias)
    other, _ = turned(model, invertible())
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert not any(node.op_type == "BatchNormalization" for node in other.graph)
    assert all(value.uses() for value in other.graph.initializers.values())


def dense(body: str) -> ir.Model:
    """A matrix, a batch normalization of what it makes, and a matrix that reads it."""
    text = f"{body}\nh = BatchNormalization(g, s, t, m, v)\ny = MatMul(h, o)"
    weights = {"w": (6, WIDTH), "b": (1, WIDTH), "o": (WIDTH, 4), **STATISTICS}
    return tiny(
        "float[5,6] x => float[] y", text, {name: w for name, w in weights.items() if re.search(rf"\b{name}\b", text)}
    )


@pytest.mark.parametrize(
    ("body", "left"),
    [("g = Gemm(x, w, b)", ["Gemm"]), ("g = Gemm<beta=0.5>(x, w, b)", ["Gemm"]), (SUM, ["MatMul", "Add"])],
)
def test_a_batch_normalization_goes_into_a_bias_of_two_axes(body: str, left: list[str]) -> None:
    model = dense(body)
    other, _ = turned(model, invertible())
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert [node.op_type for node in other.graph] == [*left, "MatMul"]


@pytest.mark.parametrize("body", ["g = MatMul(x, w)", "c = MatMul(x, w)\ng = Sub(b, c)"])
def test_a_batch_normalization_stays_where_nothing_takes_its_shift(body: str) -> None:
    found = found_in(dense(body))
    assert not found.streams
    assert any(node.op_type == "BatchNormalization" for node in found.model.graph)


def test_a_stream_that_is_not_wanted_is_left_as_it_is() -> None:
    model = normalized("")
    found = rotatable(model, observe(model, feed(model)), ("stream",), only=["another"])
    assert not found.streams
    assert [node.op_type for node in found.model.graph] == [node.op_type for node in model.graph]
    assert not any(LINEAR in node.metadata_props for node in found.model.graph)


def test_weights_from_constant_nodes_are_not_stored_twice() -> None:
    plain = ir.to_proto(bottlenecks())
    moved = list(plain.graph.initializer)
    del plain.graph.initializer[:]
    for place, tensor in enumerate(moved):
        plain.graph.node.insert(place, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    other, _ = turned(ir.from_proto(plain), invertible())
    assert all(node.outputs[0].uses() for node in other.graph if node.op_type == "Constant")


NOT_LINEAR: dict[str, tuple[str, Weights]] = {
    "an activation": ("c = Conv(x, wi, bi)\nh0 = Relu(c)", {}),
    "a layer with groups": ("c = Conv(x, wi, bi)\nh0 = Conv<group=8>(c, wg)", {"wg": (WIDTH, 1, 1, 1)}),
    "channels side by side": ("c = Conv(x, wi)\nh0 = Concat<axis=1>(c, c)", {"wi": (WIDTH // 2, 3, 1, 1)}),
    "an input": ("h0 = Concat<axis=1>(x, x, z)", {"z": (2, 2, 6, 6)}),
}


@pytest.mark.parametrize("begin", NOT_LINEAR)
def test_what_a_layer_does_not_make_keeps_its_basis(begin: str) -> None:
    text, more = NOT_LINEAR[begin]
    found = found_in(bottlenecks(begin=text, **more))
    assert not found.streams
    assert not found.refusals


def test_a_weight_that_two_layers_share_keeps_its_basis() -> None:
    body = "h = Conv(x, wi)\na = Conv(h, w)\nr = Relu(a)\nb = Conv(r, v)\ns = Relu(b)\nc = Conv(s, w)\ny = Add(a, c)"
    shared: Weights = {"wi": (WIDTH, 3, 1, 1), "w": (6, WIDTH, 1, 1), "v": (WIDTH, 6, 1, 1)}
    assert not found_in(tiny("float[2,3,6,6] x => float[] y", body, shared)).streams


def test_a_single_reader_loses_least() -> None:
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(400, 6)) @ rng.normal(size=(6, 6)), rng.normal(size=(6, 9))
    basis = basis_of_layers([rows.T @ rows], [weight @ weight.T])
    inverse = np.linalg.inv(basis)
    sizes = np.linalg.svd(rows @ weight, compute_uv=False)
    for kept in (1, 3, 5):
        lost = rows @ weight - (rows @ basis[:, :kept]) @ (inverse[:kept] @ weight)
        assert np.sum(lost**2) == pytest.approx(np.sum(sizes[kept:] ** 2), rel=0.01)


def images(count: int = 48) -> dict[str, Array]:
    """Calibration data."""
    return {"x": np.random.default_rng(5).normal(size=(count, 3, 6, 6)).astype(np.float32)}


def test_directions_that_nothing_writes_go_without_loss() -> None:
    mixed = np.linalg.qr(np.random.default_rng(2).normal(size=(WIDTH, WIDTH)))[0][:, :4]
    drawn = np.random.default_rng(3)
    flat = {"wi": (4, 3), "wp0": (4, INSIDE), "wp1": (4, INSIDE)}
    more = {name: (mixed @ drawn.normal(size=shape))[..., None, None] for name, shape in flat.items()}
    more |= {name: mixed @ drawn.normal(size=4) for name in ("bi", "bp0", "bp1")}
    model = bottlenecks(**{name: array.astype(np.float32) for name, array in more.items()})
    model.graph.inputs[0].shape = ir.Shape(["N", 3, 6, 6])
    result = onnxgrail.compress(model, data=images(), unit_ratio=0.5, blocks=["stream"], round_to=1)
    assert [block["kept"] for block in result.report.data["blocks"] if block["kind"] == "stream"] == [4]
    probe = {"x": images(50)["x"][48:]}
    check_same(run(result.model, probe), run(model, probe))


def test_layers_that_write_into_a_turned_stream_are_selected_as_usual() -> None:
    model = bottlenecks()
    model.graph.inputs[0].shape = ir.Shape(["N", 3, 6, 6])
    result = onnxgrail.compress(model, data=images(), unit_ratio=0.25, round_to=1)
    selectors = {block["kind"]: block["selector"] for block in result.report.data["blocks"]}
    assert selectors == {"conv": "obs", "stream": ""}


def test_where_bits_count_the_basis_stays() -> None:
    model = bottlenecks()
    model.graph.inputs[0].shape = ir.Shape(["N", 3, 6, 6])
    result = onnxgrail.compress(model, data=images(), target_params="70%", round_to=1)
    assert "" in {block["selector"] for block in result.report.data["blocks"]}
    result = onnxgrail.compress(model, data=images(), target_size="90%", round_to=1)
    assert {block["selector"] for block in result.report.data["blocks"]} == {"obs"}
