"""A network whose layers lie in the branches of an If: compressed, inspected and compared as others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import onnxgrail
from onnxgrail.allocation.few import fewest, rungs_of, with_bits
from onnxgrail.allocation.measures import measure_of
from onnxgrail.calibration.prepare import prepare
from onnxgrail.core import Recipe
from onnxgrail.errors import ModelError, NothingToCompressError
from onnxgrail.graph.cuts.steps import compared
from onnxgrail.machine.job import Job
from onnxgrail.search.bits import harms_of_bits
from tests.contract.test_branches import own_weights
from tests.tiny import tiny

from . import nets

WIDE, RANK = 16, 6
ROWS = 8  # samples of a feed; its other input is a number that all of them share
BODY = """
    s = MatMul(x, stem)
    flag = Equal(kind, one)
    h = If (flag) <
        then_branch = yes () => (float[N,5] t) { a = MatMul(s, a1)  b = Relu(a)  t = MatMul(b, a2) },
        else_branch = no () => (float[N,5] e) { c = MatMul(s, b1)  d = Tanh(c)  e = MatMul(d, b2) }
    >
    g = MatMul(h, c1)
    r = Relu(g)
    y = MatMul(r, c2)
"""


def redundant(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """A matrix of which a few columns make all others, so that nothing need be lost."""
    some = rng.standard_normal((rows, RANK)).astype(np.float32)
    return some[:, rng.permutation(np.arange(columns) % RANK)] * rng.uniform(0.5, 2, columns).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> ir.Model:
    rng = np.random.default_rng(0)
    shapes = {"a1": (6, WIDE), "b1": (6, WIDE), "c1": (5, WIDE)}
    weights = {name: redundant(rng, *shape) for name, shape in shapes.items()}
    weights["b1"] = weights["b1"] / np.linalg.norm(weights["b1"], axis=0)  # equal columns: tanh is not linear
    others = {"stem": (6, 6), "a2": (WIDE, 5), "b2": (WIDE, 5), "c2": (WIDE, 4), "one": np.array(1)}
    plain = tiny("float[N,6] x, int64 kind => float[N,4] y", BODY, {**weights, **others}, recorded=False)
    proto = ir.to_proto(plain)
    (choice,) = [node for node in proto.graph.node if node.op_type == "If"]
    proto.graph.node.remove(choice)
    proto.graph.node.append(choice)
    found = ir.to_proto(own_weights(ir.from_proto(proto), constant=True))
    nodes = [*found.graph.node]
    del found.graph.node[:]
    found.graph.node.extend([*nodes[:2], nodes[-1], *nodes[2:-1]])
    return ir.from_proto(found)


def feeds(kinds: list[int], seed: int = 1) -> list[dict[str, Any]]:
    """One feed for each number."""
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((ROWS, 6)).astype(np.float32), "kind": np.array(kind)} for kind in kinds]


def errors(result: Any, model: ir.Model) -> list[float]:
    """Relative squared error on other samples, for each branch."""
    some, found = feeds([1, 2], seed=7), []
    ours, theirs = (ort.InferenceSession(m) for m in (result.to_bytes(), ir.to_proto(model).SerializeToString()))
    for feed in some:
        (got,), (want,) = ours.run(None, feed), theirs.run(None, feed)
        found.append(float(np.square(got - want).mean() / np.square(want).mean()))
    return found


BOTH = [1, 2, 2, 1, 2, 1, 1, 2]
GRAIL = {"compensate": "grail", "unit_ratio": 0.5}


@pytest.mark.parametrize(
    "choices",
    [
        {"compensate": "best", "unit_ratio": 0.5},
        {**GRAIL, "closed_loop": True},
        {**GRAIL, "closed_loop": False},
        {**GRAIL, "reducer": "fold"},
        {"compensate": "grail", "target_params": "70%", "allocate": "global"},
    ],
    ids=["best", "closed", "open", "fold", "target"],
)
def test_each_branch_is_repaired_on_its_own_samples(model: ir.Model, choices: dict[str, Any]) -> None:
    common = {"data": feeds(BOTH), "round_to": 1, "exclude": "MatMul_0|t.mlp"}
    repaired, plain = (onnxgrail.compress(model, **common, **(choices | m)) for m in ({}, {"compensate": "none"}))
    blocks = repaired.report.data["blocks"]
    assert sorted(b["units"] for b in blocks) == [5, 6, WIDE, WIDE, WIDE]  # what enters and leaves the branches, too
    assert sum(b["kept"] < WIDE for b in blocks if b["units"] == WIDE) == 3
    for better, worse in zip(errors(repaired, model), errors(plain, model), strict=True):
        assert better < 0.6 * worse


def test_the_proof_compares_nothing_of_a_branch_without_samples(model: ir.Model) -> None:
    prepared = prepare(model, feeds([1] * 4), Job(recipe=Recipe()))
    assert compared(prepared.model, (), prepared.survey.facts) == ("y",)


def test_a_branch_without_samples_stays_as_it_is(model: ir.Model) -> None:
    result = onnxgrail.compress(model, data=feeds([1] * 4), unit_ratio=0.5, compensate="none", include="a|b|c|d")
    data = result.report.data
    why = [r["reason"] for r in data["refusals"]]
    assert "no sample takes the else branch of If If_2: give samples that do" in why
    touched = {member["initializer"] for block in data["blocks"] for member in block["members"]}
    assert {"a1", "a2"} <= touched
    assert not {"b1", "b2"} & touched
    (choice,) = [node for node in result.proto().graph.node if node.op_type == "If"]
    (other,) = [a.g for a in choice.attribute if a.name == "else_branch"]
    (before,) = [n for n in ir.to_proto(model).graph.node if n.op_type == "If"]
    assert other == next(a.g for a in before.attribute if a.name == "else_branch")


def test_everything_counts(model: ir.Model, tmp_path: Path) -> None:
    """Weights in branches are parameters, and what a branch multiplies is counted where samples take it."""
    source, slim = tmp_path / "m.onnx", tmp_path / "s.onnx"
    ir.save(model, source)
    found = onnxgrail.inspect(source, data=feeds(BOTH))
    total = 6 * 6 + 2 * (6 * WIDE + WIDE * 5) + 5 * WIDE + WIDE * 4
    assert found.params == total
    one = 6 * 6 + 6 * WIDE + WIDE * 5 + 5 * WIDE + WIDE * 4
    assert found.macs == one + 6 * WIDE + WIDE * 5
    result = onnxgrail.compress(source, slim, data=feeds(BOTH), unit_ratio=0.5, round_to=1, compensate="none")
    sizes = result.report.data["model"]
    assert sizes["params_before"] == total
    assert sizes["params_after"] == onnxgrail.inspect(slim, data=feeds(BOTH)).params < total
    assert sizes["macs_after"] == onnxgrail.inspect(slim, data=feeds(BOTH)).macs
    assert slim.stat().st_size < source.stat().st_size
    weighed = onnxgrail.compare(source, slim, data=feeds([2, 2]))
    assert (weighed.a.params, weighed.a.macs) == (total, one)
    assert weighed.b.macs < one


LOOP = """
    y = Loop (times, , x, w) <
        body = step (int64 i, bool go, float[N,6] s, float[6,6] v) => (bool on, float[N,6] next, float[6,6] same) {
            on = Identity(go)
            m = MatMul(s, v)
            next = MatMul(m, own)
            same = Identity(v)
        }
    >
"""


def test_a_loop_is_named_as_the_cause() -> None:
    """Weights that a converter hands from pass to pass are layers, too; those that the body holds count."""
    model = tiny("float[N,6] x => float[] y", LOOP, {"w": (6, 6), "own": (6, 6), "times": np.array(2)}, recorded=False)
    proto = ir.to_proto(model)
    body = proto.graph.node[0].attribute[0].g
    own = next(t for t in proto.graph.initializer if t.name == "own")
    body.initializer.append(own)
    proto.graph.initializer.remove(own)
    proto.graph.node[0].output.append("last")
    assert onnxgrail.inspect(proto).params == 72
    with pytest.raises(NothingToCompressError, match="its layers lie inside the body of Loop Loop_0"):
        onnxgrail.compress(proto, ratio=0.3)


def test_weights_in_nodes_of_the_branch_that_all_data_take_get_fewer_bits(tmp_path: Path) -> None:
    """As exporters of speech models write them; weights of the main graph are initializers once it is read."""
    plain = nets.mlp((24, 192, 128, 10))
    constants = [helper.make_node("Constant", [], [one.name], value=one) for one in plain.graph.initializer]
    zeros = helper.make_node("Constant", [], ["zeros"], value=numpy_helper.from_array(np.zeros((24, 10), np.float32)))
    taken = helper.make_graph([*constants, *plain.graph.node], "taken", [], plain.graph.output)
    plain.graph.output[0].name = "z"
    other = helper.make_graph([zeros, helper.make_node("MatMul", ["x", "zeros"], ["e"])], "other", [], [])
    other.output.append(helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, ["N", 10]))
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Less", ["most", "limit"], ["small"]),
        helper.make_node("If", ["small"], ["z"], then_branch=taken, else_branch=other),
    ]
    limit = numpy_helper.from_array(np.float32(1e6), "limit")
    graph = helper.make_graph(nodes, "g", plain.graph.input, plain.graph.output, [limit])
    onnx.save(helper.make_model(graph, opset_imports=plain.opset_import), tmp_path / "m.onnx")
    data, target = nets.vectors(200, 24), tmp_path / "o.onnx"
    report = onnxgrail.compress(tmp_path / "m.onnx", target, data=data, target_size="30%").report.data
    assert {"w0", "w1", "w2"} <= {one["weight"] for one in report["quantization"]["matrices"]}
    assert target.stat().st_size <= report["model"]["budget"]["limit"]
    want, got = (ort.InferenceSession(str(path)).run(None, data)[0] for path in (tmp_path / "m.onnx", target))
    assert np.square(got - want).sum() < 0.01 * np.square(want).sum()


def test_a_branch_that_keeps_the_runtime_from_loading_is_told(tmp_path: Path) -> None:
    """Exporters write a squeeze for one token; the runtime refuses that branch where it knows that there are four."""
    body = """
        n = Shape<start=0, end=1>(x)
        none = Greater(n, most)
        h = If (none) <
            then_branch = yes () => (float[N,6] t) { t = Squeeze(x, axes) },
            else_branch = no () => (float[N,4,6] e) { e = Identity(x) }
        >
        a = MatMul(h, up)
        r = Relu(a)
        y = MatMul(r, down)
    """
    weights = {"most": np.array([10**6]), "axes": np.array([1]), "up": (6, WIDE), "down": (WIDE, 5)}
    model = tiny("float[N,4,6] x => float[] y", body, weights, recorded=False)
    with pytest.raises(ModelError, match=r"cannot run this model: .*Squeeze"):
        onnxgrail.compress(model, data={"x": np.ones((8, 4, 6), np.float32)}, ratio=0.3)


def test_bits_are_asked_for_by_the_names_before_weights_were_renamed() -> None:
    """A weight that a node of a branch holds has another name in another basis: silero_vad stopped with a KeyError."""
    plain = nets.mlp((24, 192, 128, 10))
    for tensor in plain.graph.initializer:
        tensor.name += "/narrowed" if tensor.name == "w1" else ""
    for node in plain.graph.node:
        node.input[:] = [name + "/narrowed" if name == "w1" else name for name in node.input]
    recipe = Recipe(max_loss=0.05, minimize="size")
    prepared = prepare(plain, nets.vectors(64, 24), Job(recipe=recipe))
    rungs, _ = rungs_of(prepared, recipe)
    assert {"w0", "w1", "w2"} <= {rung.weight for rung in rungs}
    assert all(harm().losses for harm in harms_of_bits(prepared, rungs, lambda _: (0.01, "classes")))
    measure = measure_of(prepared, "size", bare=True)
    whole, few = (with_bits(measure, rungs, bits) for bits in ({}, fewest(rungs)))
    block = prepared.survey.blocks[0]
    half = {block.name: block.units // 2}
    assert 0 < few({}) - few(half) < 0.5 * (whole({}) - whole(half))  # narrower weights save few bits, not floats
