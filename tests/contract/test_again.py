"""A narrowed model can be narrowed again: names are new, and values in place of constants are followed."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnxgrail.graph.rewrite.unique import free_name, names_kept
from tests.contract.rule_case import Case, build
from tests.contract.test_rules import CASES, standins  # noqa: F401  a fixture that every test here uses
from tests.oracle import killed, narrowed, narrowed_equals_masked, survey_of
from tests.tiny import feed, mlp


@pytest.mark.parametrize("case", [c for c in CASES if not c.refused and not c.interface], ids=str)
def test_a_narrowed_model_narrows(case: Case) -> None:
    model = build(case)
    arrays = feed(model)
    survey = survey_of(model, arrays)
    slim = ir.from_proto(ir.to_proto(narrowed(model, survey, killed(survey, 0.25))))
    assert narrowed_equals_masked(slim, arrays, 0.25).blocks


def test_names_of_inputs_nodes_values_and_weights_are_not_free() -> None:
    graph = mlp(2).graph
    node, weight = graph[0], next(iter(graph.initializers))
    node.name = "node"
    for taken in (graph.inputs[0].name, node.name, node.outputs[0].name, weight):
        assert taken is not None
        assert free_name(graph, taken) == f"{taken}_1"
    assert free_name(graph, "new") == "new"


def test_kept_names_are_handed_out_once_and_then_forgotten() -> None:
    graph = mlp(2).graph
    with names_kept(graph):
        assert [free_name(graph, "new") for _ in range(3)] == ["new", "new_1", "new_2"]
    assert free_name(graph, "new") == "new"
