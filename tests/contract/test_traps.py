"""Graphs on which narrowing by hand goes wrong: sharing, stale records, captured and folded weights."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.oracle import check_same, killed, masked, narrowed, narrowed_equals_masked, run
from tests.tiny import batch_norm, feed, ints, lines, scalar, tiny

LAYER = """
    $i0 = MatMul($x, up$i)
    $i1 = Reshape($i0, $shape)
    $i2 = Relu($i1)
    $y = MatMul($i2, down$i)
"""
LAYERS = {"upa": (6, 8), "downa": (8, 6), "upb": (6, 8), "downb": (8, 5)}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_one_shape_for_two_layers(computed: bool, ratio: float) -> None:
    """Both layers and something that stays read one shape tensor."""
    head = "b = Shape<end=2>(x)\nshape = Concat<axis=0>(b, width)\n" if computed else ""
    body = lines(LAYER, i="a", x="x", y="m", shape="shape") + lines(LAYER, i="b", x="m", y="z", shape="shape")
    model = tiny(
        "float[N,4,6] x, float[N,4,4,2] other => float[] z, float[] kept",
        f"{head}{body}kept = Reshape(other, shape)",
        {"width": ints(8), **LAYERS} if computed else {"shape": ints(-1, 4, 8), **LAYERS},
    )
    survey = narrowed_equals_masked(model, feed(model), ratio)
    assert sorted(b.units for b in survey.blocks) == [6, 8, 8]
    two = [b for b in survey.blocks if b.units == 8]
    for block in two:  # each alone: the other still needs the old shape
        dead = np.zeros(survey.ids, dtype=bool)
        dead[block.ids[:3]] = True
        check_same(run(narrowed(model, survey, dead), feed(model)), run(masked(model, survey, dead), feed(model)))


def test_equal_constants_of_unrelated_layers_are_cloned() -> None:
    """Exporters store equal vectors once: unit scales and zero biases of unrelated layers."""
    model = tiny(
        "float[N,6] x, float[N,8] kept => float[] y, float[] z",
        """a0 = MatMul(x, upa)
        a1 = Add(a0, shared)
        a2 = Relu(a1)
        m = MatMul(a2, downa)
        b0 = MatMul(m, upb)
        b1 = Add(b0, shared)
        b2 = Sigmoid(b1)
        y = MatMul(b2, downb)
        z = Add(kept, shared)""",
        {"shared": (8,), **LAYERS},
    )
    survey = narrowed_equals_masked(model, feed(model))
    first, second = (b for b in survey.blocks if b.units == 8)
    assert {s.param for s in first.slots}.isdisjoint(s.param for s in second.slots)
    assert {s.initializer for s in first.slots} & {s.initializer for s in second.slots} == {"shared"}


def test_one_vector_as_all_parameters_of_a_norm() -> None:
    unit = np.ones(8, np.float32)
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        "a = Conv(x, w)\nb = BatchNormalization(a, one, t, t, one)\nc = Conv(b, v)\n"
        "d = BatchNormalization(c, one, t, t, one)\ne = Relu(d)\ny = Conv(e, u)",
        {"w": (8, 3, 1, 1), "v": (8, 8, 1, 1), "u": (4, 8, 1, 1), "one": unit, "t": 0 * unit},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [8, 8]


def test_tied_layers_are_one_block() -> None:
    """ALBERT: the same matrices in every layer."""
    text = """a0 = MatMul(x, upa)
        a1 = Relu(a0)
        m = MatMul(a1, downa)
        b0 = MatMul(m, upa)
        b1 = Relu(b0)
        y = MatMul(b1, downa)"""
    model = tiny("float[N,6] x => float[] y", text, {"upa": (6, 8), "downa": (8, 6)})
    survey = narrowed_equals_masked(model, feed(model))
    (block,) = survey.blocks
    assert block.units == 8
    slim = narrowed(model, survey, killed(survey, 0.5))
    assert sorted(tuple(v.shape or ()) for v in slim.graph.initializers.values()) == [(4, 6), (6, 4)]


def test_tied_embedding_and_head() -> None:
    model = tiny(
        "int64[N,4] ids => float[] y",
        "e = Gather(table, ids)\nf = Reshape(e, flat)\ng = Relu(f)\ny = Gemm<transB=1>(g, table)",
        {"table": (7, 8), "flat": ints(-1, 8)},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert block.units == 8
    assert {(s.initializer, s.axis, s.role) for s in block.slots} == {
        ("table", 1, "producer"),
        ("table", 1, "consumer"),
    }


FOLDED = {
    "transposed": ("w = Transpose(v)", {"v": (8, 6)}),
    "identity": ("w = Identity(v)", {"v": (6, 8)}),
    "cast": ("w = Cast<to=1>(v)", {"v": np.random.default_rng(0).normal(size=(6, 8)).astype(np.float16)}),
    "reshaped": ("w = Reshape(v, s)", {"v": (48,), "s": ints(6, 8)}),
    "normalised": ("m = ReduceMean(v, s)\nw = Sub(v, m)", {"v": (6, 8), "s": ints(0)}),
    "filled": ("w = ConstantOfShape<value = float[1] {0.3}>(s)", {"s": ints(6, 8)}),
}


@pytest.mark.parametrize("name", FOLDED)
def test_weight_behind_constant_nodes(name: str) -> None:
    made, weights = FOLDED[name]
    model = tiny(
        "float[N,6] x => float[] y",
        f"{made}\nh = MatMul(x, w)\nb = Add(h, c)\nr = Relu(b)\ny = MatMul(r, down)",
        {"c": (8,), "down": (8, 5), **weights},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert block.units == 8


def test_weight_in_a_constant_node() -> None:
    values = ", ".join(f"{v:.3f}" for v in np.random.default_rng(0).normal(size=48))
    model = tiny(
        "float[N,6] x => float[] y",
        f"w = Constant<value = float[6,8] {{{values}}}>()\nh = MatMul(x, w)\nr = Relu(h)\n"
        "s = Constant<value_ints = [-1, 8]>()\nf = Reshape(r, s)\n"
        "v = Constant<value = float[8,1] {1, 2, 3, 4, 5, 6, 7, 8}>()\ny = MatMul(f, v)",
        {},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [8]
    assert [v.name for v in narrowed(model, survey, killed(survey, 0.5)).graph.inputs] == ["x"]


def test_a_folded_weight_leaves_its_source_to_others() -> None:
    model = tiny(
        "float[N,6] x, float[N,8] z => float[] y, float[] u",
        "w = Transpose(v)\nh = MatMul(x, w)\nr = Relu(h)\ny = MatMul(r, down)\nu = MatMul(z, v)",
        {"v": (8, 6), "down": (8, 5)},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert block.units == 8


def test_dequantised_weights_are_left_alone() -> None:
    weight = np.random.default_rng(0).integers(-100, 100, (6, 8)).astype(np.int8)
    model = tiny(
        "float[N,6] x => float[] y",
        "w = DequantizeLinear(v, s)\nh = MatMul(x, w)\nr = Relu(h)\na = MatMul(r, down)\n"
        "b = Relu(a)\ny = MatMul(b, end)",
        {"v": weight, "s": scalar(0.01), "down": (8, 7), "end": (7, 5)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert 7 in {b.units for b in survey.blocks}


def test_recorded_shapes_of_weights_and_open_widths() -> None:
    """Dynamo records a shape for every tensor, initializers included; some widths have names."""
    model = tiny(
        "float[N,6] x, float[N,8] kept => float[] y, float[] z",
        "h = MatMul(x, up)\nr = Relu(h)\ny = MatMul(r, down)\nz = Relu(kept)",
        {"up": (6, 8), "down": (8, 5)},
    )
    proto = ir.to_proto(model)
    proto.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in proto.graph.initializer
    )
    for info in proto.graph.value_info:
        if info.name == "r":
            info.type.tensor_type.shape.dim[1].dim_param = "width"
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "width"
    model = ir.from_proto(proto)
    survey = narrowed_equals_masked(model, feed(model, width=8))
    slim = ir.to_proto(narrowed(model, survey, killed(survey, 0.5)))
    sizes = {t.name: list(t.dims) for t in slim.graph.initializer}
    assert sizes == {"up": [6, 4], "down": [4, 5]}
    for info in slim.graph.value_info:
        dims = info.type.tensor_type.shape.dim
        assert [d.dim_value for d in dims] == sizes.get(info.name, [d.dim_value for d in dims]), info.name
        if info.name == "r":
            assert not dims[1].dim_param  # that name still stands for 8 elsewhere


def test_initializers_that_are_inputs() -> None:
    model = tiny(
        "float[3,3,4,4] x => float[] y",
        "a = Conv(x, w, b)\nn = BatchNormalization(a, s, t, u, v)\nr = Relu(n)\n"
        "f = Reshape(r, flat)\ny = Gemm(f, g, h)",
        {"w": (8, 3, 1, 1), "b": (8,), "flat": ints(3, 128), "g": (128, 5), "h": (5,), **batch_norm("stuv", 8)},
        opset=9,
        ir_version=3,
    )
    survey = narrowed_equals_masked(model, feed(model))
    slim = ir.to_proto(narrowed(model, survey, killed(survey, 0.5)))
    assert [v.name for v in slim.graph.input] == [v.name for v in model.graph.inputs]
    declared = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in slim.graph.input}
    assert {t.name: list(t.dims) for t in slim.graph.initializer} == {n: s for n, s in declared.items() if n != "x"}
    assert declared["w"] == [4, 3, 1, 1]


@pytest.mark.parametrize("ir_version", [3, 10])
def test_weights_that_are_one_number_and_a_shape(ir_version: int) -> None:
    """The onnx package's light models: nothing is written out that the file did not hold."""
    model = tiny(
        "float[N,6] x => float[] y",
        "w = ConstantOfShape<value: tensor = float[1] {0.5}>(ws)\na = MatMul(x, w)\nb = Add(a, c)\nr = Relu(b)\n"
        "y = MatMul(r, v)",
        {"ws": ints(6, 8), "c": (8,), "v": (8, 5)},
        opset=9,
        ir_version=ir_version,
    )
    survey = narrowed_equals_masked(model, feed(model))
    slim = ir.to_proto(narrowed(model, survey, killed(survey, 0.5)))
    assert [v.name for v in slim.graph.input] == [v.name for v in model.graph.inputs]
    assert [n.op_type for n in slim.graph.node if "Constant" in n.op_type][-1] == "ConstantOfShape"
    assert max(len(t.raw_data) for t in slim.graph.initializer) <= 4 * 8 * 5


IF = """
    r = Relu(h)
    c = If (flag) <
        then_branch = yes () => (float[N,5] t) {{ t = MatMul({read}, {weight}) }},
        else_branch = no () => (float[N,5] e) {{ e = MatMul({read}, other) }}
    >
"""


@pytest.mark.parametrize("what", ["weight", "activation"])
def test_bodies_that_read_outer_values(what: str) -> None:
    """T5 merged: what a branch reads stays, the rest of the graph goes on."""
    text = IF.format(read="x" if what == "weight" else "r", weight="down")
    shape = {"weight": (6, 5), "activation": (8, 5)}[what]
    rest = "y = MatMul(r, down)" if what == "activation" else "g = MatMul(r, mid)\ns = Relu(g)\ny = MatMul(s, down)"
    model = tiny(
        "float[N,6] x, bool flag => float[] y, float[] c, float[] z",
        f"h = MatMul(x, up)\n{text}\n{rest}\nk = MatMul(x, side)\nl = Relu(k)\nz = MatMul(l, end)",
        {"up": (6, 8), "mid": (8, 6), "down": shape, "other": shape, "side": (6, 7), "end": (7, 2)},
    )
    arrays = feed(model) | {"flag": np.array(True)}
    survey = narrowed_equals_masked(model, arrays)
    assert sorted(b.units for b in survey.blocks) == ([7] if what == "activation" else [7, 8])
    (stuck,) = [r for r in survey.refusals if r.value == {"weight": "mid", "activation": "up"}[what]]
    assert stuck.op == "If"
    assert ("also read by" if what == "weight" else "body of If reads it") in stuck.reason


def test_a_weight_that_is_an_output_stays() -> None:
    model = tiny(
        "float[N,6] x => float[] y",
        "h = MatMul(x, up)\nr = Relu(h)\ny = MatMul(r, down)",
        {"up": (6, 8), "down": (8, 5)},
    )
    model.graph.outputs.append(model.graph.initializers["down"])
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    assert any(r.value == "up" and r.op == "output" for r in survey.refusals)


def test_constants_without_axes_keep_having_none() -> None:
    model = tiny(
        "float[N,6] x => float[] y",
        "h = MatMul(x, up)\na = Mul(h, half)\nb = Clip(a, low, high)\nc = Where(flag, b, half)\ny = MatMul(c, down)",
        {
            "up": (6, 8),
            "down": (8, 5),
            "half": scalar(0.5),
            "low": scalar(-1),
            "high": scalar(1),
            "flag": np.array(True),
        },
    )
    survey = narrowed_equals_masked(model, feed(model))
    slim = ir.from_proto(ir.to_proto(narrowed(model, survey, killed(survey, 0.5))))
    shapes = {n: tuple(v.const_value.shape) for n, v in slim.graph.initializers.items() if v.const_value is not None}
    assert shapes == {"up": (6, 4), "down": (4, 5), "half": (), "low": (), "high": (), "flag": ()}


def test_a_piece_without_width() -> None:
    """Phi-3: the part of a head that rotary embedding leaves out may be empty."""
    model = tiny(
        "float[N,6] x => float[] y",
        "h = MatMul(x, up)\na = Slice(h, zero, end, one)\nb = Slice(h, end, end, one)\nc = Relu(a)\n"
        "d = Concat<axis=1>(c, b)\ny = MatMul(d, down)",
        {"up": (6, 8), "down": (8, 5), "zero": ints(0), "end": ints(2**63 - 1), "one": ints(1)},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert block.units == 8


@pytest.mark.parametrize("piece", ["e", "f"])
def test_pieces_without_positions(piece: str) -> None:
    """The part of a head that a full rotary embedding leaves alone is empty, and has the width of the others."""
    model = tiny(
        "float[N,5,6] x => float[] y",
        "h = MatMul(x, u)\nr = Relu(h)\ne = Slice(r, five, five, one)\nf = Add(e, e)\n"
        f"z = Concat<axis=1>(r, {piece})\ny = MatMul(z, w)",
        {"u": (6, 8), "five": ints(5), "one": ints(1), "w": (8, 4)},
        recorded=False,
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert block.units == 8


def test_a_table_that_is_a_matrix_too() -> None:
    """A reader that follows on one axis of a weight holds the other one: rows that a Gather picks by id stay."""
    model = tiny(
        "int64[N,S] ids => float[] y",
        "e = Gather(table, ids)\nh = MatMul(e, up)\nr = Relu(h)\nd = MatMul(r, table)\n"
        "s = Add(e, d)\ny = MatMul(s, head)",
        {"table": (7, 4), "up": (4, 7), "head": (4, 2)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [4]
    assert any("also read by Gather" in r.reason for r in survey.refusals)


def test_a_matrix_that_is_a_constant_per_channel_too() -> None:
    """Each of its two readers loses the columns that its own channels lose."""
    model = tiny(
        "float[N,4,6] x => float[] y, float[] z",
        "h = MatMul(x, a)\np = Add(h, w)\ny = MatMul(p, b)\ng = MatMul(x, c)\nr = Relu(g)\ns = MatMul(r, w)\n"
        "t = Relu(s)\nz = MatMul(t, d)",
        {"a": (6, 5), "w": (4, 5), "b": (5, 3), "c": (6, 4), "d": (5, 3)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [5, 5]
