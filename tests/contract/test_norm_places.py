"""Places where scales and shifts can be put, and places that are left alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.core import Array
from onnxgrail.graph.fittable.scales import Place, places, widened
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger
from tests.oracle import run, survey_of
from tests.tiny import batch_norm, feed, ints, scalar, tiny

MAPS, ROWS = "float[N,3,6,5] x => float[] y", "float[N,S,6] x => float[] y"
TWO, EPS = scalar(2.0), scalar(1e-5)
MICRO = {"com.microsoft": 1}
MEAN = "q = Pow(x, two)\nm = ReduceMean(q, last)\ne = Add(m, eps)\nd = Sqrt(e)\n"
AFFINE = "o = Mul(n, g)\np = Add(o, b)\ny = Relu(p)"
APART = {"two": TWO, "eps": EPS, "last": ints(-1), "g": (6,), "b": (6,)}

CASES = {
    "conv": (MAPS, "k = Conv(x, w, b)\ny = Relu(k)", {"w": (4, 3, 1, 1), "b": (4,)}, ("repair", "k", 1, True)),
    "conv without bias": (MAPS, "k = Conv(x, w)\ny = Relu(k)", {"w": (4, 3, 1, 1)}, ("repair", "k", 1, True)),
    "depthwise": (MAPS, "k = Conv<group=3>(x, w)\ny = Relu(k)", {"w": (6, 1, 1, 1)}, ("repair", "k", 1, True)),
    "conv, batch norm": (
        MAPS,
        "k = Conv(x, w)\nn = BatchNormalization(k, s, t, u, v)\ny = Relu(n)",
        {"w": (4, 3, 1, 1)} | batch_norm("stuv", 4),
        ("repair", "n", 1, True),
    ),
    "transposed conv, batch norm": (
        MAPS,
        "k = ConvTranspose(x, w)\nn = BatchNormalization(k, s, t, u, v)\ny = Relu(n)",
        {"w": (3, 4, 1, 1)} | batch_norm("stuv", 4),
        ("repair", "n", 1, True),
    ),
    "batch norm in front": (
        MAPS,
        "n = BatchNormalization(x, s, t, u, v)\ny = Relu(n)",
        batch_norm("stuv", 3),
        ("refit", "n", 1, True),
    ),
    "layer norm": (
        ROWS,
        "n = LayerNormalization(x, g, b)\ny = Relu(n)",
        {"g": (6,), "b": (6,)},
        ("refit", "n", 2, True),
    ),
    "layer norm, no bias": (ROWS, "n = LayerNormalization(x, g)\ny = Relu(n)", {"g": (6,)}, ("refit", "n", 2, False)),
    "rms norm": (ROWS, "n = SimplifiedLayerNormalization(x, g)\ny = Relu(n)", {"g": (6,)}, ("refit", "n", 2, False)),
    "skip layer norm": (
        ROWS,
        "n = com.microsoft.SkipLayerNormalization(x, x, g, b)\ny = Relu(n)",
        {"g": (6,), "b": (6,)},
        ("refit", "n", 2, True),
    ),
    "skip rms norm": (
        ROWS,
        "n = com.microsoft.SkipSimplifiedLayerNormalization(x, x, g)\ny = Relu(n)",
        {"g": (6,)},
        ("refit", "n", 2, False),
    ),
    "instance norm": (
        MAPS,
        "n = InstanceNormalization(x, g, b)\ny = Relu(n)",
        {"g": (3,), "b": (3,)},
        ("refit", "n", 1, True),
    ),
    "rms norm apart": (ROWS, f"{MEAN}n = Div(x, d)\no = Mul(g, n)\ny = Relu(o)", APART, ("refit", "o", 2, False)),
    "rms norm by reciprocal": (
        ROWS,
        f"{MEAN}r = Reciprocal(d)\nn = Mul(x, r)\no = Mul(n, g)\ny = Relu(o)",
        APART,
        ("refit", "o", 2, False),
    ),
    "layer norm apart": (
        ROWS,
        f"a = ReduceMean(x, last)\nc = Sub(x, a)\n{MEAN.replace('Pow(x', 'Pow(c')}n = Div(c, d)\n{AFFINE}",
        APART,
        ("refit", "p", 2, True),
    ),
    "group norm apart": (
        "float[N,4,6,5] x => float[] y",
        f"r = Reshape(x, to)\ni = InstanceNormalization(r, one, zero)\nn = Reshape(i, back)\n{AFFINE}",
        {
            "to": ints(0, 2, -1),
            "back": ints(-1, 4, 6, 5),
            "one": np.ones(2, np.float32),
            "zero": np.zeros(2, np.float32),
            "g": (4, 1, 1),
            "b": (4, 1, 1),
        },
        ("refit", "p", 1, True),
    ),
}


def model_of(signature: str, body: str, weights: dict[str, tuple[int, ...] | Array]) -> ir.Model:
    return tiny(signature, body, weights, imports=MICRO)


def scaled(model: ir.Model, place: Place, scale: Array, shift: Array) -> ir.Model:
    """The model with a place's constants changed through the ledger."""
    survey = widened(model, survey_of(model, feed(model)))
    arrays: dict[str, Array] = {}
    shifts: dict[str, Array] = {}
    for part, extra in ((place.scale, 0.0), (place.bias, shift)):
        if part is not None:
            array = model.graph.initializers[part.value].const_value.numpy()
            shape = [-1 if a == part.axis else 1 for a in range(array.ndim)]
            moved = array * scale.reshape(shape) + (np.reshape(extra, shape) if np.ndim(extra) else extra)
            arrays[part.param] = moved.astype(np.float32)
    if place.shift:
        shifts[place.node] = shift
    slim = model.clone()
    dead = np.zeros(survey.ids, dtype=bool)
    apply(slim.graph, survey, Ledger(dead=dead, arrays=arrays, shifts=shifts))
    return slim


@pytest.mark.parametrize("name", CASES)
def test_changed_constants_scale_and_shift_the_output(name: str) -> None:
    signature, body, weights, (kind, output, axis, shifts) = CASES[name]
    model = model_of(signature, body, weights)
    (place,) = places(model, survey_of(model, feed(model)))
    movable = place.shift or place.bias is not None
    assert (place.kind, place.output, place.axis, movable) == (kind, output, axis, shifts)
    before = run_to(model, output)
    rng = np.random.default_rng(5)
    scale, shift = rng.uniform(0.5, 2, before.shape[axis]), rng.normal(size=before.shape[axis]) * shifts
    scale, shift = scale.astype(np.float32), shift.astype(np.float32)
    shape = [-1 if a == axis else 1 for a in range(before.ndim)]
    after = run_to(scaled(model, place, scale, shift), output)
    np.testing.assert_allclose(after, before * scale.reshape(shape) + shift.reshape(shape), atol=1e-4)


def run_to(model: ir.Model, name: str) -> Array:
    more = model.clone()
    more.graph.outputs.append(next(v for n in more.graph for v in n.outputs if v.name == name))
    return run(more, feed(model))[name]


LEFT_ALONE = {
    "a scale that two norms read": (ROWS, "n = LayerNormalization(x, g)\ny = LayerNormalization(n, g)", {"g": (6,)}),
    "a weight that two convolutions read": (MAPS, "k = Conv(x, w)\ny = Conv(k, w)", {"w": (3, 3, 1, 1)}),
    "a computed scale": (ROWS, "h = Relu(g)\ny = LayerNormalization(x, h)", {"g": (6,)}),
    "a scale from the input": ("float[N,S,6] x, float[6] g => float[] y", "y = LayerNormalization(x, g)", {}),
    "a product of no norm": (ROWS, "y = Mul(x, g)", {"g": (6,)}),
    "a mean without a root": (ROWS, "m = ReduceMean(x, l)\nd = Div(x, m)\ny = Mul(d, g)", {"g": (6,), "l": ints(-1)}),
    "a norm along another axis": (
        ROWS,
        "q = Mul(x, x)\nm = ReduceMean(q, l)\nd = Sqrt(m)\nn = Div(x, d)\ny = Mul(n, g)",
        {"g": (6,), "l": ints(1)},
    ),
    "integers with scales": (
        MAPS,
        "w = DequantizeLinear(i, s)\ny = Conv(x, w)",
        {"i": np.ones((4, 3, 1, 1), np.int8), "s": scalar(0.1)},
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    model = model_of(*LEFT_ALONE[name])
    assert places(model, survey_of(model, feed(model))) == ()


def test_a_widened_survey_has_the_same_places_and_blocks() -> None:
    model = model_of(*CASES["layer norm apart"][:3])
    survey = survey_of(model, feed(model))
    wide = widened(model, survey)
    assert [p.output for p in places(model, wide)] == ["p"]
    assert set(wide.operands) - set(survey.operands) == {("o", 1), ("p", 1)}
    assert widened(model, wide).operands.keys() == wide.operands.keys()


# ---------------------------------------------------------------------------------------------- where it is judged

JUDGED = {
    "after the next matrix": ("n = LayerNormalization(x, g)\nh = MatMul(n, w)\ny = Relu(h)", "h"),
    "with its bias": ("n = LayerNormalization(x, g)\nh = MatMul(n, w)\nk = Add(h, b)\ny = Relu(k)", "k"),
    "where it joins a residual": ("n = LayerNormalization(x, g)\nh = MatMul(n, v)\nk = Add(h, x)\ny = Relu(k)", "k"),
    "after both branches": (
        "n = LayerNormalization(x, g)\nh = MatMul(n, w)\ni = MatMul(n, w)\nj = Mul(h, i)\ny = Relu(j)",
        "j",
    ),
    "at the end": ("n = LayerNormalization(x, g)\ny = Relu(n)", "y"),
    "at itself, where two outputs follow": ("n = LayerNormalization(x, g)\ny = Relu(n)\nz = MatMul(n, w)", "n"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_judged_where_everything_passes(name: str) -> None:
    body, wanted = JUDGED[name]
    weights = {"g": (6,), "w": (6, 4), "v": (6, 6), "b": (4,)}
    outputs = "float[] y, float[] z" if "\nz" in body else "float[] y"
    model = tiny(f"float[N,S,6] x => {outputs}", body, {n: w for n, w in weights.items() if f"{n})" in body})
    (place,) = places(model, survey_of(model, feed(model)))
    assert place.judged == wanted
