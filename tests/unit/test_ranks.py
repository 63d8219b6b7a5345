"""Convolutions that become two: the same function, narrowing as a projection, and their cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepare import prepare
from onnxgrail.core import Floats, Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import Counted, dead_of, meter_of
from onnxgrail.graph.cost.spare import pairs_of, paying
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.rotation import turnable
from onnxgrail.recipe.check import recipe_of
from tests.oracle import run
from tests.tiny import feed, tiny

FEW, MANY = 32, 48
FORMS = {
    "first": ("float[2,32,6,5] x", (MANY, FEW, 3, 3), "pads=[1,1,1,1]"),
    "first, uneven padding, holes": ("float[2,32,9,9] x", (MANY, FEW, 3, 3), "pads=[0,1,2,0], dilations=[2,1]"),
    "first, as long as needed": ("float[2,32,6,5] x", (FEW, FEW, 3, 3), 'auto_pad="SAME_UPPER"'),
    "first, one axis": ("float[2,32,12] x", (MANY, FEW, 5), "pads=[2,2]"),
    "last": ("float[2,48,6,5] x", (FEW, MANY, 3, 3), "pads=[1,1,1,1]"),
    "last, every other": ("float[2,32,6,5] x", (MANY, FEW, 3, 3), "strides=[2,2]"),
}


def convolved(form: str, *, bias: bool = False) -> ir.Model:
    """A model of a single convolution of several taps, and one that reads it."""
    given, shape, attributes = FORMS[form]
    more = {"b": (shape[0],)} if bias else {}
    ones = [1] * len(shape[2:])
    return tiny(
        f"{given} => float[] y",
        f"h = Conv<{attributes}>(x, w{', b' if bias else ''})\nr = Relu(h)\ny = Conv(r, v)",
        {"w": shape, "v": (4, shape[0], *ones), **more},
    )


def divided(model: ir.Model) -> Rotatable:
    """The model with its convolution in two."""
    found = rotatable(model, observe(model, feed(model)), ("rank",))
    assert list(found.heads) == ["w"]
    return found


def basis_for(found: Rotatable) -> Floats:
    """A random invertible basis."""
    width = found.heads["w"].width
    return np.random.default_rng(1).normal(size=(width, width)) + 2 * np.eye(width)


def turned(model: ir.Model) -> tuple[ir.Model, Survey, Floats]:
    """The model in two parts in a random basis, its trace, and the basis."""
    found = divided(model)
    basis = basis_for(found)
    other = rotate(found, {"w": basis})
    return other, trace(other, observe(other, feed(model))), basis


def without(model: ir.Model, survey: Survey, widths: dict[str, int]) -> ir.Model:
    """The model with blocks of some widths."""
    slim = model.clone()
    apply(slim.graph, survey, Ledger(dead=dead_of(survey, widths), arrays={}))
    restore(slim)
    return slim


def ranked(survey: Survey) -> str:
    """The name of the block between two convolutions."""
    (name,) = [block.name for block in survey.blocks if block.kind == "rank"]
    return name


def same(one: ir.Model, two: ir.Model) -> None:
    """Compare the results of two models."""
    arrays = feed(one)
    np.testing.assert_allclose(run(two, arrays)["y"], run(one, arrays)["y"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_two_convolutions_are_the_same_function(form: str, *, bias: bool) -> None:
    model = convolved(form, bias=bias)
    other, survey, _ = turned(model)
    assert sum(node.op_type == "Conv" for node in other.graph) == 3
    assert len(pairs_of(other, survey)) == 1
    same(model, other)


@pytest.mark.parametrize("computed", ["Cast<to=1>(w)", "Div(u, s)"])
def test_a_weight_may_be_computed_from_constants(computed: str) -> None:
    body = f"u = Cast<to=1>(w)\nc = {computed}\nh = Conv<pads=[1,1,1,1]>(x, c)\nr = Relu(h)\ny = Conv(r, v)"
    numbers = np.random.default_rng(0).normal(size=(MANY, FEW, 3, 3)).astype(np.float16)
    model = tiny("float[2,32,6,5] x => float[] y", body, {"w": numbers, "v": (4, MANY, 1, 1), "s": np.float32([2])})
    found = rotatable(model, observe(model, feed(model)), ("rank",))
    (name,) = found.heads
    basis = np.linalg.qr(basis_for(replace(found, heads={"w": found.heads[name]})))[0]  # for half precision
    other = rotate(found, {name: basis})
    assert len(pairs_of(other, trace(other, observe(other, feed(model))))) == 1
    arrays = feed(model)
    np.testing.assert_allclose(run(other, arrays)["y"], run(model, arrays)["y"], rtol=1e-3, atol=5e-2)


@pytest.mark.parametrize("form", FORMS)
def test_fewer_channels_between_them_are_a_projection(form: str) -> None:
    model = convolved(form, bias=True)
    other, survey, basis = turned(model)
    kept = 20
    slim = without(other, survey, {ranked(survey): kept})
    weight = model.graph.initializers["w"]
    assert weight.const_value is not None
    numbers = weight.const_value.numpy()
    projection = basis[:, :kept] @ np.linalg.inv(basis)[:kept]
    axis = 1 if form.startswith("first") else 0
    moved = np.tensordot(projection.astype(np.float32), numbers, (axis, axis))
    weight.const_value = ir.tensor(np.ascontiguousarray(np.moveaxis(moved, 0, axis)), name="w")
    same(model, slim)
    assert not any("onnxgrail" in key for node in slim.graph for key in node.metadata_props)


REFUSED = {
    "few channels": "h = Conv<pads=[1,1,1,1]>(x, thin)\ny = Conv(h, after)",
    "one tap": "h = Conv(x, single)\ny = Relu(h)",
    "groups": "h = Conv<group=2>(x, grouped)\ny = Relu(h)",
    "shared": "h = Conv<pads=[1,1,1,1]>(x, w)\nk = Relu(h)\ny = Conv<pads=[1,1,1,1]>(k, w)",
    "many to few": "h = Conv(x, narrow)\ny = Relu(h)",
}


@pytest.mark.parametrize("form", REFUSED)
def test_convolutions_that_two_would_not_make_cheaper_stay(form: str) -> None:
    shapes = {
        "thin": (16, 32, 3, 3), "after": (4, 16, 1, 1), "single": (64, 32, 1, 1), "grouped": (32, 16, 3, 3),
        "w": (32, 32, 3, 3), "narrow": (32, 32, 1, 2),
    }  # fmt: skip
    text = REFUSED[form]
    used = {name: shape for name, shape in shapes.items() if f" {name})" in text or f"({name}" in text}
    model = tiny("float[2,32,6,5] x => float[] y", text, used)
    assert not rotatable(model, observe(model, feed(model)), ("rank",)).heads


COUNTED: dict[Counted, str] = {"params": "params", "macs": "macs", "bytes": "bytes"}


@pytest.mark.parametrize("counted", COUNTED)
@pytest.mark.parametrize("form", FORMS)
def test_one_convolution_stays_where_two_cost_more(form: str, counted: Counted) -> None:
    """The cost of widths is that of the cheaper one of both forms, in each of which the model is really narrowed."""
    model = convolved(form)
    alone = trace(model, observe(model, feed(model)))
    other, survey, _ = turned(model)
    before, meter = cost(other, counted), meter_of(other, survey, counted)
    name, (outer,) = ranked(survey), [block.name for block in alone.blocks]
    units = {block.name: block.units for block in survey.blocks}
    for kept in (units[outer], 17):
        one = cost(without(model, alone, {outer: kept}), counted)
        for between in (units[name], units[name] - 1, 20, 3):
            two = cost(without(other, survey, {outer: kept, name: between}), counted)
            widths = {outer: kept, name: between}
            assert before - meter.saved(widths) == min(one, two), (kept, between)
            whole = paying(other, survey, widths, lambda some: before - meter.saved(some))[name] == units[name]
            assert whole == (one <= two)


def in_eight(shape: tuple[int, ...]) -> int:
    """The bytes of a weight in 8 bits, with a scale per channel."""
    return int(np.prod(shape)) + 4 * shape[0]


@pytest.mark.parametrize("form", FORMS)
def test_in_few_bits_too_the_cheaper_form_counts(form: str) -> None:
    model = convolved(form)
    alone = trace(model, observe(model, feed(model)))
    other, survey, _ = turned(model)
    meter = meter_of(other, survey, "bytes")
    before, sizes = eights(other), dict.fromkeys(other.graph.initializers, in_eight)
    name, (outer,) = ranked(survey), [block.name for block in alone.blocks]
    for kept in (FEW, 17):
        one = eights(without(model, alone, {outer: kept}))
        for between in (FEW, FEW - 1, 20, 3):
            widths = {outer: kept, name: between}
            two = eights(without(other, survey, widths))
            assert before - meter.saved(widths, sizes) == min(one, two), (kept, between)


def eights(model: ir.Model) -> int:
    """The bytes of a model's weights if all have 8 bits."""
    shapes = [value.shape for value in model.graph.initializers.values()]
    return sum(in_eight(tuple(shape.numpy())) for shape in shapes if shape is not None)


def cost(model: ir.Model, counted: Counted) -> int:
    """The cost of a model, counted on its own."""
    if counted == "macs":
        return counting.macs(model, trace(model, observe(model, feed(model))))
    return counting.parameters(model) if counted == "params" else weight_bytes(model)


def test_what_tells_the_basis_is_a_tensor_of_the_model() -> None:
    """Also where the first part hands the name of an output over to the second one."""
    given, shape, attributes = FORMS["last"]
    model = tiny(f"{given} => float[] y", f"y = Conv<{attributes}>(x, w)", {"w": shape})
    assert {part.source for part in divided(model).heads["w"].parts} == {("y", 1)}


@pytest.mark.parametrize(
    ("choices", "divided_too"),
    [
        ({"max_loss": 0.01}, True),
        ({"max_loss": 0.01, "minimize": "macs"}, True),
        ({"max_loss": 0.01, "quantize": "int8"}, False),  # kernels in 8 bits are not measured
        ({"max_loss": 0.01, "providers": ("CUDAExecutionProvider",)}, False),
        ({"max_loss": 0.01, "compensate": "grail"}, False),
        ({"unit_ratio": 0.5}, False),
        ({"ratio": 0.5}, True),
    ],
    ids=str,
)
def test_convolutions_become_two_where_losses_and_kernels_can_tell(choices: dict[str, Any], divided_too: bool) -> None:
    model = convolved("first")
    data = {"x": np.random.default_rng(0).normal(size=(4, 32, 6, 5)).astype(np.float32)}
    prepared = prepare(model, data, Job(recipe=Recipe(samples=4, batch_size=2)))
    found = turnable(prepared, recipe_of(choices))
    assert (found is not None and "w" in found.heads) == divided_too
