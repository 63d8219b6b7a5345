"""Random small graphs with a part in the branches of an If: narrowed equals masked, whichever branch is taken.

`ONNXGRAIL_FUZZ=2000` (`make fuzz`) tries a tenth as many, others in every run.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from onnxgrail.graph.flatten.branches import folded
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger
from tests.contract.test_branches import seen
from tests.masks import masked
from tests.oracle import killed, run, session
from tests.property.branched import FLAG, branched
from tests.property.grown import Grown, fuzzed, graphs
from tests.property.test_graphs import LARGEST, check_close
from tests.tiny import feed

COUNT = int(os.environ.get("ONNXGRAIL_FUZZ", "0")) // 10
FEW = 15


def test_narrowed_equals_masked() -> None:
    """With samples for both branches, or for one: then the other stays as it is."""
    found: Counter[str] = Counter()

    @fuzzed(COUNT, FEW, HealthCheck.filter_too_much)
    @given(graphs(), st.integers(0, 10**6), st.booleans())
    def check(grown: Grown, seed: int, both: bool) -> None:
        model = branched(grown.model, np.random.default_rng(seed))
        assume(model is not None)
        assert model is not None
        feeds = [feed(grown.model) | {FLAG: np.array(flag)} for flag in (True, False)]
        try:
            handle = session(model)
            before = [run(handle, one) for one in feeds]
        except Exception:  # noqa: BLE001  the runtime cannot always tell the types that leave a branch
            return
        assume(all(np.abs(array).max(initial=0) < LARGEST for some in before for array in some.values()))
        found.update(["graphs", *(["narrowed"] if compare(model, feeds, feeds if both else feeds[:1], seed) else [])])

    check()
    assert found["narrowed"] > found["graphs"] // 4


def compare(
    model: ir.Model, feeds: list[dict[str, np.ndarray]], samples: list[dict[str, np.ndarray]], seed: int
) -> bool:
    """Narrow and mask the same random units of every block; return True if a weight in a branch is cut."""
    known, survey = seen(model, samples)
    if known.model is model:
        pytest.fail("an If that runs was not entered")
    assert ir.to_proto(folded(known.model)).SerializeToString() == ir.to_proto(model).SerializeToString()
    dead = killed(survey, (0.2, 0.5, 0.9)[seed % 3], seed=seed % 4)
    flat = known.model.clone()
    apply(flat.graph, survey, Ledger(dead=dead, arrays={}))
    handles = [session(folded(flat)), session(folded(masked(known.model, survey, dead)))]
    for one in feeds:
        check_close(*(run(handle, one) for handle in handles))
    inside = {node.outputs[0].name for node in known.model.graph if node.meta.get("onnxgrail.scope")}
    return any(place[0] in inside for place in survey.operands)
