"""Residual streams in another basis: the same function, and without channels, that of a projected stream."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrail.algebra.rotation import basis_of, unnormed
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Array, Floats, Stats
from onnxgrail.graph.rotate.basis import rotatable, rotate
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.tracer import trace
from tests.e2e.test_formats import HALF, NARROW, halved
from tests.forms import as_nodes
from tests.oracle import check_same, distance, passes_checker, run, survey_of
from tests.prenorm import BEGINS, ENDS, FORMS, WIDTH, prenorm
from tests.tiny import feed, tiny
from tests.turned import begun, found_in, orthogonal, projected, turned, with_fused_products, without

KEPT = 7
NETS = [
    ("LayerNormalization", begin, end)
    for begin in BEGINS
    for end in ENDS
    if end != "tied" or begin in ("table", "positions")
] + [(form, "table", "scores") for form in FORMS if form != "LayerNormalization"]


@pytest.mark.parametrize(("form", "begin", "end"), NETS)
def test_another_basis_is_the_same_function(form: str, begin: str, end: str) -> None:
    model = prenorm(form, begin, end)
    other, _ = turned(model, feed(model), orthogonal(WIDTH))
    check_same(run(other, feed(model)), run(model, feed(model)))
    restore(other)
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert not any(node.op_type == "SimplifiedLayerNormalization" for node in other.graph)
    assert all(value.uses() for value in other.graph.initializers.values())


@pytest.mark.parametrize(("form", "begin", "end"), NETS)
def test_fewer_channels_are_a_projection(form: str, begin: str, end: str) -> None:
    model, basis = prenorm(form, begin, end), orthogonal(WIDTH)
    slim = without(*turned(model, feed(model), basis), KEPT)
    want = run(projected(model, feed(model), basis[:, :KEPT]), feed(model))
    check_same(run(slim, feed(model)), want)
    assert np.abs(want["y"] - run(model, feed(model))["y"]).max() > 1e-2
    if passes_checker(ir.to_proto(model).SerializeToString()):
        onnx.checker.check_model(ir.to_proto(slim), full_check=True)


def test_layers_that_read_a_stream_and_write_into_a_head() -> None:
    """Their weights change twice, and get a bias for the shift of the normalization before them."""
    model = as_nodes(prenorm(), lambda value: value.name != "table" and len(value.shape or ()) == 2)
    found = rotatable(model, observe(model, feed(model)), ("stream", "qk", "vo"))
    assert (len(found.streams), len(found.heads)) == (1, 2)
    bases = dict.fromkeys(found.streams, orthogonal(WIDTH))
    bases |= {name: orthogonal(inside.width)[None] for name, inside in found.heads.items()}
    check_same(run(rotate(found, bases), feed(model)), run(model, feed(model)))


@pytest.mark.parametrize("form", FORMS)
def test_products_of_onnx_runtime_are_layers_too(form: str) -> None:
    """Its optimized files have them where a factor follows a product or a transpose precedes it."""
    model, basis = with_fused_products(prenorm(form)), orthogonal(WIDTH)
    other, survey = turned(model, feed(model), basis)
    check_same(run(other, feed(model)), run(model, feed(model)))
    slim = without(other, survey, KEPT)
    check_same(run(slim, feed(model)), run(projected(model, feed(model), basis[:, :KEPT]), feed(model)))
    assert not any("basis" in name for name in other.graph.initializers)


@pytest.mark.parametrize("kind", HALF)
def test_half_types_stay_where_norms_are_wider_and_matrices_are_added(kind: str) -> None:
    plain = prenorm("in double", "activation")
    for cast in (node for node in plain.graph if node.op_type == "Cast"):
        if cast.attributes["to"].as_int() == onnx.TensorProto.FLOAT:
            cast.attributes["to"] = ir.AttrInt64("to", NARROW[kind])
    model = halved(plain, kind)
    other, survey = turned(model, feed(model), orthogonal(WIDTH))
    slim = without(other, survey, KEPT)
    restore(other)
    assert distance(run(other, feed(model)), run(model, feed(model))) < 0.03
    for made in (other, slim):
        onnx.checker.check_model(ir.to_proto(made), full_check=True)
    assert {v.dtype.numpy() for v in slim.graph.initializers.values() if v.name.endswith("/basis")} == {HALF[kind]}


SCALED = ("ds$i = Mul(db$i, scale$i)", "dt$i = Identity(db$i)\nds$i = Mul(scale$i, dt$i)")


@pytest.mark.parametrize("scaled", SCALED)
def test_the_scale_of_a_layer_is_folded(scaled: str) -> None:
    model = prenorm(scaled=scaled, depth=5)
    other, survey = turned(model, feed(model), orthogonal(WIDTH))
    assert not any(node.op_type == "Mul" for node in other.graph)
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert [b.units for b in survey.blocks if b.kind == "stream"] == [WIDTH]


def test_zeros_that_are_added_are_passed() -> None:
    model = prenorm(scaled="dt$i = Add(db$i, none)\nds$i = Sub(dt$i, none)")
    other, _ = turned(model, feed(model), orthogonal(WIDTH))
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert [node.op_type for node in other.graph].count("MatMul") == [n.op_type for n in model.graph].count("MatMul")


def test_a_scale_whose_layer_something_else_reads_stays() -> None:
    model = prenorm(scaled="dt$i = Mul(db$i, scale$i)\ndm$i = ReduceMax <keepdims=0> (db$i)\nds$i = Mul(dt$i, dm$i)")
    other, _ = turned(model, feed(model), orthogonal(WIDTH))
    assert any("basis" in name for name in other.graph.initializers)
    check_same(run(other, feed(model)), run(model, feed(model)))


@pytest.mark.parametrize("opset", [13, 18])
def test_norms_are_written_for_the_opset_of_the_model(opset: int) -> None:
    model = prenorm("written out" if opset >= 18 else "reciprocal")
    if opset < 18:
        model = older(model)
    other, survey = turned(model, feed(model), orthogonal(WIDTH))
    slim = without(other, survey, KEPT)
    onnx.checker.check_model(ir.to_proto(slim), full_check=True)
    assert run(slim, feed(model))["y"].shape == run(model, feed(model))["y"].shape


def older(model: ir.Model) -> ir.Model:
    """The same model in opset 13, where axes are attributes."""
    for node in model.graph:
        if node.op_type == "ReduceMean":
            node.attributes["axes"] = ir.AttrInt64s("axes", [-1])
            node.resize_inputs(1)
    model.graph.opset_imports[""] = 13
    return model


def test_a_sum_inside_a_fused_normalization_is_found() -> None:
    text = """
        x0 = Gather(table, ids)
        y0 = LayerNormalization <axis=-1, epsilon=0.001> (x0, g0, s0)
        h0 = MatMul(y0, up)
        r0 = Relu(h0)
        d0 = MatMul(r0, down)
        y1, m1, v1, x1 = com.microsoft.SkipLayerNormalization <epsilon=0.001> (x0, d0, g1, s1, bias)
        h1 = MatMul(y1, up1)
        r1 = Relu(h1)
        d1 = MatMul(r1, down1)
        y2 = com.microsoft.SkipLayerNormalization <epsilon=0.001> (x1, d1, g2, s2)
        y = MatMul(y2, head)"""
    shapes = {"table": (7, WIDTH), "bias": (WIDTH,), "up": (WIDTH, 8), "down": (8, WIDTH), "head": (WIDTH, 3)}
    shapes |= {"up1": (WIDTH, 8), "down1": (8, WIDTH), **{f"{v}{i}": (WIDTH,) for v in "gs" for i in range(3)}}
    model = tiny("int64[N,S] ids => float[N,S,3] y", text, shapes, imports={"com.microsoft": 1}, recorded=False)
    found = found_in(model, feed(model))
    assert [len(stream.norms) for stream in found.streams.values()] == [3]
    other, survey = turned(model, feed(model), orthogonal(WIDTH))
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert [b.units for b in survey.blocks if b.kind == "stream"] == [WIDTH]


def walled(hidden: int, depth: int = 6) -> ir.Model:
    """Layers whose result is normalized before it is added: each such normalization needs a matrix."""
    body, shapes = "x0 = Gather(table, ids)", {"table": (7, WIDTH), "head": (WIDTH, 5)}
    for i in range(depth):
        body += f"""
            y{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x{i}, g{i})
            h{i} = MatMul(y{i}, up{i})
            r{i} = Relu(h{i})
            d{i} = MatMul(r{i}, down{i})
            n{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (d{i}, s{i})
            x{i + 1} = Add(x{i}, n{i})"""
        shapes |= {f"up{i}": (WIDTH, hidden), f"down{i}": (hidden, WIDTH), f"g{i}": (WIDTH,), f"s{i}": (WIDTH,)}
    body += f"\nz = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x{depth}, g0)\ny = MatMul(z, head)"
    return tiny("int64[N,S] ids => float[] y", body, shapes)


def test_a_stream_with_many_normalized_writers_gets_a_matrix_for_each() -> None:
    model, basis = walled(4 * WIDTH), orthogonal(WIDTH)
    other, survey = turned(model, feed(model), basis)
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert sum("basis" in name for name in other.graph.initializers) == 6
    slim = without(other, survey, KEPT)
    check_same(run(slim, feed(model)), run(projected(model, feed(model), basis[:, :KEPT]), feed(model)))


def test_matrices_that_cost_more_than_a_narrower_stream_saves_are_refused_with_the_numbers() -> None:
    model = walled(2 * WIDTH)
    found = found_in(model, feed(model))
    assert not found.streams
    tokens = math.prod(feed(model)["ids"].shape)
    added, saved = 6 * 0.75 * WIDTH**2 * tokens, 0.25 * (6 * 2 * WIDTH + 5) * WIDTH * tokens
    assert saved < added
    (why,) = found.refusals
    assert why.op == "SimplifiedLayerNormalization"
    assert why.reason == (
        "6 places like this one depend on the basis of the stream, and with 75% of its channels "
        f"their matrices add {added:,.0f} multiply-accumulates where {saved:,.0f} are saved"
    )


def test_a_stream_with_two_kinds_of_normalizations_is_refused_by_name() -> None:
    rest = """
        z = SimplifiedLayerNormalization(x1, g1)
        y9 = LayerNormalization(x1, g0, s0)
        z9 = Add(y9, z)
        y = MatMul(z9, head)"""
    shapes = {"table": (7, WIDTH), "up": (WIDTH, 8), "down": (8, WIDTH), "head": (WIDTH, 3)}
    model = begun(rest, shapes | dict.fromkeys(("g0", "s0", "g1"), (WIDTH,)))
    found = found_in(model, feed(model))
    assert not found.streams
    why = "layer and RMS normalizations read the same stream"
    assert [refusal.reason for refusal in found.refusals] == [why]


def test_norms_after_every_sum_are_no_stream() -> None:
    body = """
        x0 = Gather(table, ids)
        d0 = MatMul(x0, a)
        x1 = Add(x0, d0)
        y1 = LayerNormalization(x1, g, s)
        d1 = MatMul(y1, b)
        x2 = Add(y1, d1)
        y2 = LayerNormalization(x2, g, s)
        y = MatMul(y2, head)"""
    shapes = {"table": (7, WIDTH), "a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "head": (WIDTH, 3)}
    model = tiny("int64[N,S] ids => float[N,S,3] y", body, {**shapes, "g": (WIDTH,), "s": (WIDTH,)})
    found = found_in(model, feed(model))
    assert not found.streams
    assert not found.refusals


def looked_up() -> ir.Model:
    """A large table, and layers that bend what is looked up."""
    text = """
        e = Gather(table, ids)
        r = Relu(e)
        h = MatMul(r, up)
        a = Relu(h)
        y = MatMul(a, down)"""
    return tiny("int64[N,S] ids => float[N,S,3] y", text, {"table": (60, WIDTH), "up": (WIDTH, 9), "down": (9, 3)})


def test_a_table_gets_a_basis_of_its_own() -> None:
    model, basis = looked_up(), orthogonal(WIDTH)
    facts = survey_of(model, feed(model)).facts
    assert not rotatable(model, facts, ("stream",)).streams
    found = rotatable(model, facts, ("embedding",))
    assert list(found.streams) == ["table"]
    other = rotate(found, {"table": basis})
    check_same(run(other, feed(model)), run(model, feed(model)))
    survey = trace(other, observe(other, feed(other)))
    (block,) = [b for b in survey.blocks if b.kind == "embedding"]
    assert block.ranked == "table"
    check_same(run(without(other, survey, KEPT), feed(model)), run(with_rank(model, basis), feed(model)))


def with_rank(model: ir.Model, basis: Floats) -> ir.Model:
    """The model with its table projected on the first vectors of a basis."""
    other, values, narrow = model.clone(), model.graph.initializers["table"].const_value, basis[:, :KEPT]
    assert values is not None
    numbers = (values.numpy() @ narrow @ narrow.T).astype(np.float32)
    other.graph.initializers["table"].const_value = ir.tensor(numbers, name="table")
    return other


TIED = {
    "transposed": "f = Transpose <perm=[1,0]> (table)\ny = MatMul(a, f)",
    "one row": "one = Gather <axis=1> (a, zero)\ny = Gemm <transB=1> (one, table)",
    "looked up twice": """
        f = Transpose <perm=[1,0]> (table)
        z = MatMul(a, f)
        b = Gather(table, ids)
        y = Concat <axis=-1> (z, b)""",
}


@pytest.mark.parametrize("head", TIED)
def test_a_table_that_is_the_head_too_gets_a_basis_of_its_own(head: str) -> None:
    text = f"e = Gather(table, ids)\nr = Relu(e)\nh = MatMul(r, up)\na = Relu(h)\n{TIED[head]}"
    used = {"table": (60, WIDTH), "up": (WIDTH, WIDTH), "zero": np.array(0, dtype=np.int64)}
    model, basis = tiny("int64[N,S] ids => float[] y", text, used, recorded=False), orthogonal(WIDTH)
    found = rotatable(model, survey_of(model, feed(model)).facts, ("embedding",))
    assert list(found.streams) == ["table"]
    other = rotate(found, {"table": basis})
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert sum(np.prod(v.shape.numpy()) == 60 * WIDTH for v in other.graph.initializers.values() if v.shape) == 1
    survey = trace(other, observe(other, feed(other)))
    check_same(run(without(other, survey, KEPT), feed(model)), run(with_rank(model, basis), feed(model)))


def test_tables_that_something_else_reads_stay() -> None:
    for text in ("y = Identity(e)\nz = Relu(table)", "y = Relu(e)\nz = Gather <axis=1> (table, ids)"):
        body = f"e = Gather(table, ids)\n{text}"
        model = tiny("int64[N,S] ids => float[] y, float[] z", body, {"table": (60, WIDTH)}, recorded=False)
        assert not rotatable(model, survey_of(model, feed(model)).facts, ("embedding",)).streams


def test_the_basis_holds_the_most_energy_first() -> None:
    rng = np.random.default_rng(0)
    draws = [rng.normal(size=(50, 5)) * [1, 5, 2, 0.1, 3] for _ in range(2)]
    grams = [d.T @ d for d in draws]
    basis = basis_of(grams)
    energy = np.diag(basis.T @ sum(g / np.trace(g) for g in grams) @ basis)
    np.testing.assert_allclose(basis.T @ basis, np.eye(5), atol=1e-12)
    assert (np.diff(energy) <= 0).all()
    np.testing.assert_array_equal(basis, basis_of(grams))


def test_gain_and_shift_are_taken_out_of_second_moments() -> None:
    rng = np.random.default_rng(1)
    z, gain, shift = rng.normal(size=(40, 4)), np.array([0.5, 2, -1, 0]), rng.normal(size=4)
    y: Array = z * gain + shift
    found = unnormed(Stats(gram=y.T @ y, total=y.sum(axis=0), count=len(y)), gain, shift)
    known = z.copy()
    known[:, 3] = 0
    np.testing.assert_allclose(found, known.T @ known, atol=1e-9)
