"""Local functions: written out on loading, or left as calls that refuse only what reaches them."""

from __future__ import annotations

import time

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.graph.flatten.functions import inlined
from onnxgrail.graph.io.model_file import load
from tests.oracle import check_same, narrowed_equals_masked, run
from tests.tiny import feed, tiny

GATED = """
<domain: "local", opset_import: ["" : 20, "inner" : 1]>
Gated <alpha> (x, up, down) => (y) {
    a = MatMul(x, up)
    b = inner.Act <alpha: float = @alpha> (a)
    y = MatMul(b, down)
}
<domain: "inner", opset_import: ["" : %d]>
Act <alpha> (a) => (b) {
    b = LeakyRelu <alpha: float = @alpha> (a)
}
"""
CALLS = """
    m = local.Gated <alpha = 0.3> (x, upa, downa)
    n = Relu(m)
    o = local.Gated <alpha = 0.1> (n, upb, downb)
    p = MatMul(o, side)
    q = Sigmoid(p)
    y = MatMul(q, end)
"""
WEIGHTS = {"upa": (6, 8), "downa": (8, 5), "upb": (5, 8), "downb": (8, 6), "side": (6, 7), "end": (7, 2)}


def calling(inner_opset: int = 20) -> ir.Model:
    """Two calls of a function that calls another."""
    imports = {"local": 1, "inner": 1}
    return tiny(
        "float[N,6] x => float[N,2] y", CALLS, WEIGHTS, imports=imports, functions=GATED % inner_opset, recorded=False
    )


@pytest.mark.parametrize("opset", [20, 18])
def test_functions_are_written_out(opset: int) -> None:
    """Also those for another opset whose operators are the same in the model's."""
    source = calling(opset)
    model = load(source)
    assert not model.functions
    assert dict(model.opset_imports) == {"": 20}
    assert set(model.graph.initializers) == set(WEIGHTS)
    assert [v.name for v in model.graph.outputs] == ["y"]
    assert [n.op_type for n in model.graph][:3] == ["MatMul", "LeakyRelu", "MatMul"]
    assert set(source.functions) == {("local", "Gated", ""), ("inner", "Act", "")}  # the caller's model stays
    check_same(run(model, feed(source)), run(source, feed(source)))
    survey = narrowed_equals_masked(model, feed(model))
    assert sorted(b.units for b in survey.blocks) == [5, 6, 7, 8, 8]


def test_versions_of_local_functions_do_not_matter() -> None:
    """A function may import its own domain, and those of others, in any version, as jax2onnx writes them."""
    source = calling()
    source.functions["local", "Gated", ""].opset_imports.update({"inner": 20, "local": 20, "unused": 5})
    model = load(source)
    assert not model.functions
    assert dict(model.opset_imports) == {"": 20}
    check_same(run(model, feed(source)), run(calling(), feed(source)))
    assert len(narrowed_equals_masked(model, feed(model)).blocks) == 5
    assert source.functions["local", "Gated", ""].opset_imports["inner"] == 20  # the caller's model stays


def test_a_function_of_another_opset_stays_a_call() -> None:
    model = load(calling(inner_opset=13))
    assert list(model.functions) == [("inner", "Act", "")]
    assert dict(model.opset_imports) == {"": 20, "inner": 1}
    survey = narrowed_equals_masked(model, feed(model))
    assert sorted(b.units for b in survey.blocks) == [5, 6, 7]
    assert {r.reason for r in survey.refusals if r.op == "Act"} == {"no rule for inner Act-1"}


def test_a_model_without_functions_is_itself() -> None:
    source = tiny("float[N,6] x => float[N,2] y", "y = MatMul(x, w)", {"w": (6, 2)})
    source.opset_imports["unused"] = 3
    assert dict(load(source).opset_imports) == {"": 20, "unused": 3}


@pytest.mark.parametrize("as_bytes", [False, True])
def test_compress_through_functions(as_bytes: bool) -> None:
    source = ir.to_proto(calling())
    result = onnxgrail.compress(source.SerializeToString() if as_bytes else source, unit_ratio=0.5, round_to=1)
    slim = result.model
    assert isinstance(slim, ir.Model)
    assert {n: tuple(v.shape or ()) for n, v in slim.graph.initializers.items()}["upa"] == (6, 4)
    assert np.isfinite(run(slim, feed(calling()))["y"]).all()


def test_many_calls_of_one_function_get_their_own_names_soon() -> None:
    calls, size = 300, 100
    inner = "\n".join(f"h{k + 1} = Identity(h{k})" for k in range(size))
    whole = "\n".join(f"s{k + 1} = many.F(s{k})" for k in range(calls))
    head = '<ir_version: 10, opset_import: ["" : 20, "many" : 1]>\ng (float[2] s0) => (float[2] s300) {'
    function = f'<domain: "many", opset_import: ["" : 20]>\nF (h0) => (h{size}) {{ {inner} }}'
    model = ir.from_onnx_text(f"{head} {whole} }}\n{function}")
    started = time.process_time()
    made = inlined(model)
    assert time.process_time() - started < 6  # trying name after name took 10 s, now it is 1.4
    names = [value.name for node in made.graph for value in node.outputs]
    assert len(set(names)) == len(names) == calls * size
    assert {"h1", "h1_2", "h1_300"} <= set(names)
    assert not made.functions
