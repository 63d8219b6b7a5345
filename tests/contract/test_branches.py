"""Channels inside the branches of If: followed, measured on samples that come there, and narrowed where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrail.calibration.branching import Seen, look
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.flatten.branches import folded, unfolded
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.graph.trace.tracer import trace
from tests.masks import masked
from tests.oracle import check_same, killed, run
from tests.tiny import feed, ints, tiny

CPU = ("CPUExecutionProvider",)
PAIR = """
    y = If (flag) <
        then_branch = yes () => (float[N,5] t) {{ a = MatMul(x, up)  r = Relu(a)  {inner}  t = MatMul({last}, down) }},
        else_branch = no () => (float[N,5] e) {{ b = MatMul(x, wide)  s = Tanh(b)  e = MatMul(s, narrow) }}
    >
"""
WEIGHTS = {"up": (6, 8), "down": (8, 5), "wide": (6, 7), "narrow": (7, 5)}
INPUTS = "float[N,6] x, bool flag => float[] y"


def seen(model: ir.Model, feeds: Sequence[Feed]) -> tuple[Seen, Survey]:
    """Return the findings on these feeds."""
    makers = tuple(lambda one=one: one for one in feeds)  # type: ignore[misc]
    found = look(model, Batches(feeds=makers, samples=len(feeds), source="test"), CPU)
    return found, trace(found.model, found.facts)


def narrowed_equals_masked(model: ir.Model, feeds: Sequence[Feed], ratio: float = 0.5) -> Survey:
    """Kill some units of every block, put the branches back, and compare with the mask on every feed."""
    found, survey = seen(model, feeds)
    assert found.model is not model
    before = ir.to_proto(model).SerializeToString()
    assert ir.to_proto(folded(found.model)).SerializeToString() == before
    dead = killed(survey, ratio)
    flat = found.model.clone()
    apply(flat.graph, survey, Ledger(dead=dead, arrays={}))
    slim, goal = folded(flat), folded(masked(found.model, survey, dead))
    onnx.checker.check_model(ir.to_proto(slim), full_check=True)
    assert [n.op_type for n in slim.graph] == [n.op_type for n in model.graph]
    for one in feeds:
        check_same(run(slim, one), run(goal, one))
    return survey


def both(model: ir.Model) -> list[Feed]:
    """A feed for each branch."""
    return [feed(model) | {"flag": np.array(flag)} for flag in (True, False)]


def own_weights(model: ir.Model, *, constant: bool) -> ir.Model:
    """Move weights from the outer graph into the branches that read them, as initializers or Constant nodes."""
    proto = ir.to_proto(model)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    for attribute in proto.graph.node[-1].attribute:
        body = attribute.g
        mine = [weights.pop(name) for node in list(body.node) for name in node.input if name in weights]
        if constant:
            nodes = [onnx.helper.make_node("Constant", [], [one.name], value=one) for one in mine]
            nodes += list(body.node)
            del body.node[:]
            body.node.extend(nodes)
        else:
            body.initializer.extend(mine)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(weights.values())
    return ir.from_proto(proto)


@pytest.mark.parametrize("where", ["outside", "initializers", "constants"])
def test_blocks_inside_a_branch(where: str) -> None:
    """Each branch has a block of its own, whether its weights lie in it or around it."""
    model = tiny(INPUTS, PAIR.format(inner="", last="r"), WEIGHTS)
    if where != "outside":
        model = own_weights(model, constant=where == "constants")
    survey = narrowed_equals_masked(model, both(model))
    assert sorted(b.units for b in survey.blocks) == [7, 8]
    assert {s.initializer for b in survey.blocks for s in b.slots} == set(WEIGHTS)


def test_names_may_be_the_same_in_both_branches() -> None:
    """The file keeps them; what is said of them tells them apart."""
    model = own_weights(tiny(INPUTS, PAIR.format(inner="", last="r"), WEIGHTS), constant=False)
    proto = ir.to_proto(model)
    names = {"b": "a", "s": "r", "e": "t", "wide": "up", "narrow": "down"}
    (body,) = [a.g for a in proto.graph.node[-1].attribute if a.name == "else_branch"]
    for node in body.node:
        for field in (node.input, node.output):
            field[:] = [names.get(name, name) for name in field]
    for one in (*body.initializer, *body.output):
        one.name = names[one.name]
    del body.value_info[:]
    twins = ir.from_proto(proto)
    survey = narrowed_equals_masked(twins, both(twins))
    assert sorted(b.units for b in survey.blocks) == [7, 8]
    assert {s.initializer for b in survey.blocks for s in b.slots} == {"up", "down", "y/else/up", "y/else/down"}


def test_channels_that_leave_both_branches_are_tied() -> None:
    body = """
        h = If (flag) <
            then_branch = yes () => (float[N,8] t) { a = MatMul(x, up)  t = Relu(a) },
            else_branch = no () => (float[N,8] e) { b = MatMul(x, other)  e = Tanh(b) }
        >
        y = MatMul(h, down)
    """
    model = tiny(INPUTS, body, {"up": (6, 8), "other": (6, 8), "down": (8, 5)})
    (block,) = narrowed_equals_masked(model, both(model)).blocks
    assert block.units == 8
    assert {s.initializer for s in block.producers} == {"up", "other"}


def test_a_branch_that_gives_a_constant() -> None:
    """It is cut like the channels that the other branch makes."""
    body = """
        h = If (flag) <
            then_branch = yes () => (float[N,8] t) { a = MatMul(x, up)  t = Relu(a) },
            else_branch = no () => (float[N,8] e) { e = Identity(start) }
        >
        y = MatMul(h, down)
    """
    model = tiny(INPUTS, body, {"up": (6, 8), "start": (3, 8), "down": (8, 5)})
    (block,) = narrowed_equals_masked(model, both(model)).blocks
    assert [s.initializer for s in block.slots if s.role == "passenger"] == ["e"]


def test_channels_enter_branches() -> None:
    """Both branches read channels that are made outside, one of them in an If of its own."""
    body = """
        h = MatMul(x, up)
        y = If (flag) <
            then_branch = yes () => (float[N,5] t) { a = Relu(h)  t = MatMul(a, down) },
            else_branch = no () => (float[N,5] e) {
                more = Identity(flag)
                e = If (more) <
                    then_branch = deep () => (float[N,5] d) { d = MatMul(h, third) },
                    else_branch = flat () => (float[N,5] f) { b = Tanh(h)  f = MatMul(b, fourth) }
                >
            }
        >
    """
    weights = {"up": (6, 8), "down": (8, 5), "third": (8, 5), "fourth": (8, 5)}
    model = tiny(INPUTS, body, weights)
    survey = seen(model, both(model))[1]
    assert not survey.blocks
    (stuck,) = [r for r in survey.refusals if r.value == "up"]
    assert stuck.reason == "no sample takes the then branch of If e: give samples that do"
    assert stuck.op == "If"
    reachable = tiny(INPUTS, body.replace("Identity(flag)", "Not(flag)"), weights)
    survey = seen(reachable, both(reachable))[1]
    assert [r.reason for r in survey.refusals if r.value == "up"] == [stuck.reason.replace("then", "else")]


def test_channels_enter_nested_branches() -> None:
    body = """
        h = MatMul(x, up)
        y = If (flag) <
            then_branch = yes () => (float[N,5] t) { a = Relu(h)  t = MatMul(a, down) },
            else_branch = no () => (float[N,5] e) {
                e = If (more) <
                    then_branch = deep () => (float[N,5] d) { d = MatMul(h, third) },
                    else_branch = flat () => (float[N,5] f) { b = Tanh(h)  f = MatMul(b, fourth) }
                >
            }
        >
    """
    weights = {"up": (6, 8), "down": (8, 5), "third": (8, 5), "fourth": (8, 5)}
    model = tiny(INPUTS.replace("bool flag", "bool flag, bool more"), body, weights)
    feeds = [one | {"more": np.array(more)} for one in both(model) for more in (True, False)]
    (block,) = narrowed_equals_masked(model, feeds).blocks
    assert {s.initializer for s in block.consumers} == {"down", "third", "fourth"}


def test_a_branch_may_come_with_other_sizes() -> None:
    """Samples that take the second branch are longer; in each branch sizes are those of its own samples."""
    body = """
        y = If (flag) <
            then_branch = yes () => (float[N,T,5] t) {
                a = MatMul(x, up)  p = Reshape(a, heads)  q = Relu(p)  r = Reshape(q, back)  t = MatMul(r, down)
            },
            else_branch = no () => (float[N,T,5] e) {
                b = MatMul(x, wide)  l = Shape(b)  g = Reshape(b, l)  s = Tanh(g)  e = MatMul(s, narrow)
            }
        >
    """
    model = tiny(
        "float[N,T,6] x, bool flag => float[] y", body, WEIGHTS | {"heads": ints(0, 0, 4, 2), "back": ints(0, 0, 8)}
    )
    feeds = [feed(model, T=4) | {"flag": np.array(True)}, feed(model, T=9) | {"flag": np.array(False)}]
    survey = narrowed_equals_masked(model, feeds)
    assert sorted(b.units for b in survey.blocks) == [4, 7]


def test_a_branch_that_no_sample_takes_is_named() -> None:
    model = tiny(INPUTS, PAIR.format(inner="", last="r"), WEIGHTS)
    survey = narrowed_equals_masked(model, both(model)[:1])
    assert [b.units for b in survey.blocks] == [8]
    stuck = [r for r in survey.refusals if r.op == "If"]
    assert {r.reason for r in stuck} == {"no sample takes the else branch of If If_0: give samples that do"}
    assert {(r.node, r.value) for r in stuck} == {("If_0", "narrow"), ("If_0", "down")}  # its layers, and what joins it


def test_branches_of_different_shapes() -> None:
    """Channels that leave an If stay where the branches do not agree on the axes."""
    body = """
        h = If (flag) <
            then_branch = yes () => (float[N,1,8] t) { a = MatMul(x, up)  t = Unsqueeze(a, one) },
            else_branch = no () => (float[N,8] e) { e = MatMul(x, other) }
        >
        y = MatMul(h, down)
    """
    model = tiny(INPUTS, body, {"up": (6, 8), "other": (6, 8), "down": (8, 5), "one": ints(1)}, recorded=False)
    survey = seen(model, both(model))[1]
    assert not survey.blocks
    assert {r.reason for r in survey.refusals if r.op == "If"} == {
        "the branches of If_0 make tensors of different shapes"
    }


def test_an_if_in_the_body_of_a_loop_stays_whole() -> None:
    body = """
        y = Loop (times, , x) <
            body = step (int64 i, bool go, float[N,6] s) => (bool on, float[N,6] next) {
                on = Identity(go)
                next = If (flag) <
                    then_branch = yes () => (float[N,6] t) { t = MatMul(s, v) },
                    else_branch = no () => (float[N,6] e) { e = Neg(s) }
                >
            }
        >
    """
    model = tiny(INPUTS, body, {"v": (6, 6), "times": np.array(2)})
    assert unfolded(model) is model


def test_an_if_with_another_graph_is_refused_by_the_runtime() -> None:
    model = tiny(INPUTS, PAIR.format(inner="", last="r"), WEIGHTS)
    node = next(node for node in model.graph if node.op_type == "If")
    extra = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="extra")
    node.attributes["equation"] = ir.AttrGraph("equation", extra)
    with pytest.raises(ModelError, match="Unrecognized attribute: equation"):
        seen(model, both(model))


def test_masks_have_effects() -> None:
    """The oracle above would not notice a mask that does nothing."""
    model = tiny(INPUTS, PAIR.format(inner="", last="r"), WEIGHTS)
    found, survey = seen(model, both(model)[:1])
    dense = run(model, both(model)[0])
    dead = killed(survey, 0.5)
    check_same(run(folded(found.model), both(model)[0]), dense)
    with pytest.raises(AssertionError):
        check_same(run(folded(masked(found.model, survey, dead)), both(model)[0]), dense)
