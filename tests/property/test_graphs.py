"""Random small graphs: whatever the tracer offers equals the mask, at random ratios.

`make test` tries a few, always the same; `ONNXGRAIL_FUZZ=2000` (`make fuzz`) tries that many, others in every run.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
from hypothesis import HealthCheck, Phase, assume, event, given, seed, settings
from hypothesis import strategies as st

from onnxgrail.core import Array
from tests.oracle import check_recorded, check_same, killed, masked, narrowed, run, session, short, survey_of
from tests.property.grown import STEPS, Grown, graphs
from tests.tiny import feed

COUNT = int(os.environ.get("ONNXGRAIL_FUZZ", "0"))
FEW = 150
settings.register_profile(
    "graphs",
    max_examples=COUNT or FEW,
    derandomize=not COUNT,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@settings(settings.get_profile("graphs"))
@given(graphs(), st.sampled_from([0.2, 0.5, 0.9]), st.integers(0, 3))
def test_narrowed_equals_masked(grown: Grown, ratio: float, number: int) -> None:
    """Equal to the mask, on the feed, on a shorter batch and on other sequence lengths, or refused with a reason."""
    compare(grown, ratio, number)


def compare(grown: Grown, ratio: float, number: int) -> None:
    model, arrays = grown.model, feed(grown.model)
    dense = session(model)
    before = run(dense, arrays)
    assume(all(np.isfinite(a).all() and np.abs(a).max(initial=0) < 1e4 for a in before.values()))
    survey = survey_of(model, arrays)
    for refusal in survey.refusals:
        assert refusal.reason
        assert refusal.value
    event("blocks: " + ("some" if survey.blocks else "none"))
    dead = killed(survey, ratio, seed=number)
    slim, mask = narrowed(model, survey, dead), masked(model, survey, dead)
    handles = session(slim), session(mask)
    for some in feeds(grown, arrays):
        run(dense, some)  # every graph that is drawn runs at all of these sizes
        got, want = (run(handle, some) for handle in handles)
        check_same(got, want)
    check_recorded(slim, arrays)


def feeds(grown: Grown, arrays: dict[str, Array]) -> list[dict[str, Array]]:
    """Of the first size, with a sample less, and with longer and shorter sequences."""
    fewer = short(arrays)
    assert fewer is not None
    found = [arrays, fewer]
    if grown.sequence:
        found += [feed(grown.model, S=length, N=batch) for length, batch in ((8, 2), (1, 4))]
    return found
