"""Every op rule against the mask oracle, in a model of its own; what it refuses is refused with a reason."""

from __future__ import annotations

import pytest

from onnxgrail.graph.ops import rule
from tests.contract.cases_blocked import CASES as BLOCKED
from tests.contract.cases_cache import CASES as CACHE
from tests.contract.cases_einsum import CASES as EINSUM
from tests.contract.cases_experts import CASES as EXPERTS
from tests.contract.cases_fused import CASES as FUSED
from tests.contract.cases_join import CASES as JOIN
from tests.contract.cases_layout import CASES as LAYOUT
from tests.contract.cases_linear import CASES as LINEAR
from tests.contract.cases_lookups import LOOKUPS
from tests.contract.cases_pick import CASES as PICK
from tests.contract.cases_pointwise import CASES as POINTWISE
from tests.contract.cases_quantised import CASES as QUANTISED
from tests.contract.cases_recurrent import CASES as RECURRENT
from tests.contract.cases_reduce import CASES as REDUCE
from tests.contract.cases_stacked import CASES as STACKED
from tests.contract.cases_standin import CASES as STANDIN
from tests.contract.cases_standin import DOMAIN
from tests.contract.cases_vision import CASES as VISION
from tests.contract.rule_case import SIDE, Case, build
from tests.oracle import narrowed_equals_masked
from tests.tiny import feed

CASES = [*POINTWISE, *LINEAR, *EINSUM, *RECURRENT, *REDUCE, *LAYOUT, *FUSED, *CACHE, *JOIN, *PICK, *VISION, *BLOCKED]
CASES += [*QUANTISED, *LOOKUPS, *STACKED, *STANDIN, *EXPERTS]


MICROSOFT = "com.microsoft"


@pytest.fixture(autouse=True)
def standins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of ops without a CPU kernel, under the name of the functions that stand in for them."""
    for op in {c.op for c in STANDIN}:
        monkeypatch.setitem(rule._RULES, (DOMAIN, op), rule._RULES[MICROSOFT, op])
        if (MICROSOFT, op) in rule._NARROWS:
            monkeypatch.setitem(rule._NARROWS, (DOMAIN, op), rule._NARROWS[MICROSOFT, op])


def covered(case: Case) -> tuple[str, str, int]:
    """The registered rule that a case runs."""
    return (
        case.domain,
        case.op,
        max(s for d, o, s, *_ in rule.table() if (d, o) == (case.domain, case.op) and s <= case.opset),
    )


def test_every_rule_has_a_case() -> None:
    known = {covered(c) for c in CASES}
    known |= {(MICROSOFT, op, since) for domain, op, since in known if domain == DOMAIN}
    assert not sorted({entry[:3] for entry in rule.table()} - known)


def test_names_tell_cases_apart() -> None:
    names = [str(c) for c in CASES]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    model = build(case)
    assert (case.domain, case.op) in {(n.domain, n.op_type) for n in model.graph}
    for seed, ratio in enumerate(case.ratios):
        survey = narrowed_equals_masked(model, feed(model), ratio, seed=seed, interface=case.interface)
    assert sorted(b.units for b in survey.blocks) == sorted((*case.units, SIDE))
    stuck = [r for r in survey.refusals if r.value == "w_in"]
    if case.refused:
        assert any(
            r.op == (case.by or case.op) and r.node.startswith(r.op) and case.refused in r.reason for r in stuck
        ), stuck
    else:
        assert not stuck


def test_an_op_without_a_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(Case(op="Tanh", body="z = Tanh(h)"))
    monkeypatch.delitem(rule._RULES, ("", "Tanh"))
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [SIDE]
    (stuck,) = [r for r in survey.refusals if r.value == "w_in"]
    assert (stuck.op, stuck.node, stuck.reason) == ("Tanh", "Tanh_1", "no rule for ai.onnx Tanh-20")


def test_an_output_of_the_model_is_named() -> None:
    model = build(Case(op="Tanh", body="z = Tanh(h)"))
    model.graph.outputs.append(next(n for n in model.graph if n.op_type == "Tanh").outputs[0])
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [SIDE]
    (stuck,) = [r for r in survey.refusals if r.value == "w_in"]
    assert (stuck.op, stuck.node) == ("output", "z")


@pytest.mark.parametrize("wrong", [1, 18])
def test_a_second_rule_for_an_op_is_a_mistake(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    monkeypatch.setattr(rule, "_RULES", {("", "Foo"): [(1, lambda site: None), (18, lambda site: None)]})
    with pytest.raises(ValueError, match=f"two rules for Foo-{wrong}"):
        rule.rule("Foo", since=wrong)(lambda site: None)
