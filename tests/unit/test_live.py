"""Live ranges against a walk over the graph, and the choice of a place to cut."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.observe import observe
from onnxgrail.graph.cuts.live import Lives, lives
from onnxgrail.graph.trace.facts import Facts
from tests.tiny import cnn, feed, mlp, scalar, tiny


def observed(model: ir.Model) -> tuple[Facts, Lives]:
    facts = observe(model, feed(model))
    return facts, lives(model, facts, [1] * len(model.graph))


def needed(model: ir.Model, facts: Facts, position: int) -> set[str]:
    """Activations that exist in front of a node and are read by it or a later one."""
    nodes = list(model.graph)
    made = {v.name for v in model.graph.inputs} | {v.name for n in nodes[:position] for v in n.outputs}
    read = {v.name for n in nodes[position:] for v in n.inputs if v is not None}
    return {str(n) for n in (made & read) - facts.constants}


@pytest.mark.parametrize("model", [mlp(2), cnn()], ids=["mlp", "cnn"])
def test_what_a_cut_has_to_keep(model: ir.Model) -> None:
    facts, found = observed(model)
    for position in range(len(list(model.graph))):
        assert set(found.at(position)) == needed(model, facts, position)


def test_load_counts_bytes_of_what_is_kept_except_inputs() -> None:
    model = mlp(2)
    facts, found = observed(model)
    for position in range(len(list(model.graph))):
        kept = needed(model, facts, position) - {"x"}
        assert found.load[position] == sum(4 * np.prod(facts.shapes[n]) for n in kept)


def test_bodies_keep_what_they_read_alive() -> None:
    model = tiny(
        "float[N,6] x, bool flag => float[] y",
        "h = Relu(x)\na = Neg(h)\nb = Abs(a)\n"
        "y = If (flag) <then_branch = yes () => (float[N,6] t) { t = Add(b, h) },"
        " else_branch = no () => (float[N,6] e) { e = Sub(b, h) }>",
        {},
    )
    facts = observe(model, feed(model) | {"flag": np.array(True)})
    assert set(lives(model, facts, [1] * len(model.graph)).at(3)) == {"b", "h", "flag"}


def test_no_cut_keeps_a_sequence() -> None:
    text = """
        h = Relu(x)
        s = SplitToSequence <axis=0, keepdims=1> (h)
        a = SequenceAt(s, zero)
        r = Relu(a)
        b = SequenceAt(s, one)
        y = Add(r, b)"""
    numbers = {"zero": np.array(0, dtype=np.int64), "one": np.array(1, dtype=np.int64)}
    model = tiny("float[2,3] x => float[1,3] y", text, numbers)
    _, found = observed(model)
    assert [set(found.at(position)) for position in (2, 3, 4)] == [{"h"}, {"h", "a"}, {"h", "r"}]


def test_constants_never_live() -> None:
    model = tiny("float[N,6] x => float[] y", "c = Neg(one)\nd = Exp(c)\nh = Mul(x, d)\ny = Abs(h)", {"one": scalar(1)})
    _, found = observed(model)
    assert set(found.names) == {"x", "h"}


def test_the_best_cut_is_the_latest_among_the_light_ones() -> None:
    load = np.array([9, 4, 8, 5, 7, 1, 9])
    found = Lives((), np.zeros(0, np.int64), np.zeros(0, np.int64), load, np.arange(7))
    assert found.best(0, 4, again=1.0) == 3
    assert found.best(0, 4, again=1.0, slack=1.0) == 1
    assert found.best(2, 2) == 2
    assert found.best(0, 6, again=1.0) == 5


def test_a_light_cut_near_the_inputs_does_not_hold_the_stream_back() -> None:
    """Ids and masks weigh nothing; to stay with them would run the whole prefix for every block."""
    load = np.array([0, 0, 50, 60, 50, 90, 50])
    found = Lives((), np.zeros(0, np.int64), np.zeros(0, np.int64), load, np.array([0, 1, 2, 30, 60, 80, 100]))
    assert found.best(0, 6) == 6
    assert found.best(0, 5) == 5
    assert found.best(0, 5, again=0.3) == 4
