"""The modeled latency of convolutions that may become two is that of the faster form, at any widths of neighbors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxgrail.graph.cost.spare import paying
from onnxgrail.search.kernels import Kernels
from onnxgrail.search.latency import latency_measure
from tests.unit.test_latency_model import fake, prepared_of
from tests.unit.test_ranks import FORMS, convolved, ranked, turned


@pytest.mark.parametrize("form", FORMS)
def test_one_convolution_stays_where_two_take_longer(form: str) -> None:
    alone = prepared_of(convolved(form))
    model, survey, _ = turned(alone.model)
    both = replace(alone, model=model, survey=survey)
    name, (outer,) = ranked(survey), [block.name for block in alone.survey.blocks]
    units = {block.name: block.units for block in survey.blocks}
    shares = ({}, *({block: max(1, full // part) for block, full in units.items()} for part in (2, 3, 5)))
    cost = latency_measure(both, Kernels(measured=tuple(fake(both, widths) for widths in shares)))
    assert cost.given == cost({}) < cost.before
    for kept in (units[outer], 17):
        one = fake(alone, {outer: kept}).ms
        assert cost({outer: kept}) == pytest.approx(one, rel=0.02)
        for between in (units[name] - 1, 20, 3):
            widths = {outer: kept, name: between}
            two = fake(both, widths).ms
            assert cost(widths) == pytest.approx(min(one, two), rel=0.02)
            if abs(one - two) > 0.05 * one:
                assert (paying(model, survey, widths, cost)[name] == units[name]) is (one < two)
