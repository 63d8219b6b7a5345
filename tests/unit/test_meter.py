"""Any widths cost what `cost` says of the units that go, and what the narrowed model has."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import dead_of, meter_of
from tests.oracle import narrowed, survey_of
from tests.tiny import feed
from tests.unit.test_cost import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_meter_agrees_with_the_cost_of_the_graph(name: str) -> None:
    model = MODELS[name]
    survey = survey_of(model, feed(model))
    meters = {counted: meter_of(model, survey, counted) for counted in ("params", "macs", "bytes")}
    rng = np.random.default_rng(0)
    total = counting.macs(model, survey)
    for _ in range(6):
        widths = {b.name: int(rng.integers(1, b.units + 1)) for b in survey.blocks}
        dead = dead_of(survey, widths)
        assert [int((~dead[b.ids]).sum()) for b in survey.blocks] == list(widths.values())
        gone, size = counting.removed(survey, dead)
        assert meters["params"].saved(widths) == gone
        assert meters["bytes"].saved(widths) == size
        assert meters["macs"].saved(widths) == total - counting.macs(model, survey, dead)
        assert counting.parameters(model) - gone == counting.parameters(narrowed(model, survey, dead))
        for block in survey.blocks:
            other = widths | {block.name: block.units}
            for meter in meters.values():
                step = meter.near(block, widths[block.name], widths) - meter.near(block, block.units, widths)
                assert step == meter.saved(widths) - meter.saved(other)
    assert meters["params"].saved({}) == 0


def test_a_question_that_was_asked_before_counts_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["mlp"]
    survey = survey_of(model, feed(model))
    found, other = (meter_of(model, survey, "params") for _ in range(2))
    asked = [{block.name: width} for block in survey.blocks for width in (1, 2, 3)]
    wanted = [found.saved(widths) for widths in asked]
    found._known.clear()
    found._parts = ()
    assert [found.saved(widths) for widths in asked] == wanted
    monkeypatch.setattr("onnxgrail.graph.cost.meter.REMEMBERED", 2)
    assert [other.saved(widths) for widths in asked] == wanted
    assert len(other._sums) <= 2
