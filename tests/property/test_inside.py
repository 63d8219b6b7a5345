"""Random small graphs with attention: in other bases inside heads they compute the same, and narrow to projections.

`ONNXGRAIL_FUZZ=2000` tries that many graphs instead of a few.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
from hypothesis import HealthCheck, assume, given

from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.proof import prove
from onnxgrail.graph.rotate.basis import rotatable, rotate
from onnxgrail.graph.trace.tracer import trace
from tests.oracle import run, session, survey_of
from tests.property.grown import Grown, fuzzed, graphs
from tests.property.test_graphs import LARGEST, check_close, feeds, opened
from tests.tiny import feed

COUNT = int(os.environ.get("ONNXGRAIL_FUZZ", "0"))
FEW = 25
KINDS = ("qk", "vo")


def test_other_bases_inside_heads() -> None:
    found: Counter[str] = Counter()

    @fuzzed(COUNT, FEW, HealthCheck.filter_too_much)
    @given(graphs())
    def check(grown: Grown) -> None:
        assume("attention" in grown.steps)
        found.update(["graphs", *turned(grown)])

    check()
    assert found["vo"]
    if COUNT:  # layer normalizations leave few queries
        print(f"\n{dict(found)}")
        assert found["qk"]
        assert found["pairs"]


def turned(grown: Grown) -> list[str]:
    """Turn all heads that can be turned, compare, and prove what is narrowed.

    Returns:
        The kinds of the blocks inside, and `pairs` if some of them are picked.
    """
    model, arrays = grown.model, feed(grown.model)
    dense = opened(model)
    assume(all(np.abs(a).max(initial=0) < LARGEST for a in run(dense, arrays).values()))
    bases = rotatable(model, survey_of(model, arrays).facts, KINDS)
    if not bases.heads:
        return []
    rng = np.random.default_rng(0)
    drawn = {
        name: np.linalg.qr(rng.normal(size=one.same.shape))[0] * rng.uniform(0.5, 2, one.width)
        if one.units is None
        else rng.permutation(one.same)
        for name, one in bases.heads.items()
    }
    other = rotate(bases, drawn)
    handle = session(other)
    for some in feeds(grown, arrays):
        check_close(run(handle, some), run(dense, some))
    survey = trace(other, observe(other, arrays))
    inner = [block for block in survey.blocks if block.kind in KINDS]
    trial = trial_of(other, survey, arrays, ("CPUExecutionProvider",))
    good, refusals = prove(trial, survey.blocks, {block.name: max(1, block.units // 2) for block in survey.blocks})
    assert not refusals
    assert len(good) == len(survey.blocks)
    pairs = ["pairs"] * any(one.units is not None for one in bases.heads.values())
    return [*sorted({block.kind for block in inner}), *pairs]
