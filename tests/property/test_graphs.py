"""Random small graphs: whatever the tracer offers equals the mask, at random ratios.

`make test` tries a few, always the same; `ONNXGRAIL_FUZZ=2000` (`make fuzz`) tries that many, others in every run, and
prints how often each step was taken.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from onnxgrail.core import Array
from tests.masks import masked
from tests.oracle import EFFECT, TOLERANCE, check_recorded, killed, narrowed, run, session, short, survey_of
from tests.property.grown import RARE_STEPS, STEPS, Grown, fuzzed, graphs
from tests.tiny import feed

COUNT = int(os.environ.get("ONNXGRAIL_FUZZ", "0"))
FEW = 120
SHARE = 0.5  # of the graphs change when they are narrowed, at least: with nothing to narrow all would be equal
FLOOR = 0.01  # rounding errors are relative to numbers of this size at least
LARGEST = 1e4  # of any output: beyond it rounding errors say nothing


def test_narrowed_equals_masked() -> None:
    """Equal to the mask, on the feed, on a shorter batch and on other sequence lengths, or refused with a reason."""
    found: Counter[str] = Counter()

    @fuzzed(COUNT, FEW)
    @given(graphs(), st.sampled_from([0.2, 0.5, 0.9]), st.integers(0, 3))
    def check(grown: Grown, ratio: float, number: int) -> None:
        narrower = compare(grown, ratio, number)
        found.update(["graphs", *(["narrowed"] if narrower else []), *grown.steps])

    check()
    assert found["narrowed"] > SHARE * found["graphs"]
    if COUNT:
        steps = {step.__name__ for table in (STEPS, RARE_STEPS) for steps in table.values() for step in steps}
        print(f"\n{found['graphs']} graphs, {found['narrowed']} of them narrowed; steps that were never taken:")
        print(", ".join(sorted(steps - {*found})) or "none")


def compare(grown: Grown, ratio: float, number: int) -> bool:
    """Narrow and mask the same random units of every block; whether an output changes by it."""
    model, arrays = grown.model, feed(grown.model)
    dense = opened(model)
    before = run(dense, arrays)
    assume(all(np.abs(a).max(initial=0) < LARGEST for a in before.values()))
    survey = survey_of(model, arrays)
    for refusal in survey.refusals:
        assert refusal.reason
        assert refusal.value
    dead = killed(survey, ratio, seed=number)
    slim, mask = narrowed(model, survey, dead), masked(model, survey, dead)
    handles = session(slim), session(mask)
    for some in feeds(grown, arrays):
        run(dense, some)  # every graph that is drawn runs at all of these sizes
        check_close(*(run(handle, some) for handle in handles))
    check_recorded(slim, arrays)
    after = run(handles[1], arrays)
    return any(np.abs(after[name] - array).max(initial=0) > EFFECT for name, array in before.items())


def opened(model: ir.Model) -> ort.InferenceSession:
    """The model as it was drawn; ONNX Runtime cannot always tell how many sizes a Resize gets."""
    try:
        return session(model)
    except Exception as error:
        if "Number of elements of input 'sizes' (0)" in str(error):
            reject()
        raise


def check_close(got: dict[str, Array], want: dict[str, Array]) -> None:
    """As `check_same`, but sums of many numbers that happen to cancel need not agree to their last digit."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].shape == array.shape, name
        assert np.abs(got[name] - array).max(initial=0) <= TOLERANCE * max(np.abs(array).max(initial=0), FLOOR), name


def feeds(grown: Grown, arrays: dict[str, Array]) -> list[dict[str, Array]]:
    """Of the first size, with a sample less, with more of them, and with longer and shorter sequences."""
    fewer = short(arrays)
    assert fewer is not None
    found = [arrays, fewer, feed(grown.model, N=5)]
    if grown.sequence:
        found += [feed(grown.model, S=length, N=batch) for length, batch in ((8, 2), (1, 4))]
    return found
