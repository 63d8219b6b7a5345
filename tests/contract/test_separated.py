"""Layers whose activation is separated when a model is loaded, against the mask oracle."""

from __future__ import annotations

import pytest

from onnxgrail.graph.io.model_file import load
from tests.contract.cases_fused import Microsoft
from tests.contract.rule_case import SIDE, Case, build
from tests.oracle import narrowed_equals_masked
from tests.tiny import feed

CASES: list[Case] = [
    Microsoft(
        op="FusedConv",
        body='z = com.microsoft.FusedConv<activation="Relu">(h, v, b)',
        weights={"v": (6, 8, 1, 1), "b": (6,)},
        frame="maps",
        width=6,
        units=(6, 8),
    ),
    Microsoft(
        op="FusedConv",
        body='z = com.microsoft.FusedConv<activation="Relu", group=8, pads=[1,1,1,1]>(h, v, b)',
        weights={"v": (8, 1, 3, 3), "b": (8,)},
        frame="maps",
        note="depthwise",
    ),
    Microsoft(
        op="FusedConv",
        body='s = Conv(x, also)\nz = com.microsoft.FusedConv<activation="Relu">(h, v, b, s)',
        weights={"v": (6, 8, 1, 1), "b": (6,), "also": (6, 3, 1, 1)},
        frame="maps",
        width=6,
        units=(6, 8),
        note="summed",
    ),
    Microsoft(
        op="FusedGemm",
        body='z = com.microsoft.FusedGemm<activation="Relu", transB=1>(h, v, b)',
        weights={"v": (6, 8), "b": (6,)},
        frame="rows",
        width=6,
        units=(6, 8),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_separated_layer_is_narrowed(case: Case) -> None:
    fused = build(case)
    assert (case.domain, case.op) in {(n.domain, n.op_type) for n in fused.graph}
    model = load(fused)
    for seed, ratio in enumerate(case.ratios):
        survey = narrowed_equals_masked(model, feed(fused), ratio, seed=seed)
    assert sorted(b.units for b in survey.blocks) == sorted((*case.units, SIDE))
    assert not [r for r in survey.refusals if r.value == "w_in"]
