"""One candidate loses less than another one on the same samples, by more than chance explains."""

from __future__ import annotations

import numpy as np

from onnxgrail.narrowing.bits.measuring import _less


def test_losses_of_the_same_samples_are_compared() -> None:
    before = np.array([0.3, 0.1, 0.4, 0.2])
    assert _less(before, before - [0.05, 0.06, 0.05, 0.06])
    assert not _less(before, before - [0.5, -0.4, 0.4, -0.5])
    assert not _less(before, before)


def test_another_output_may_have_several_losses_per_sample() -> None:
    before = np.repeat([0.3, 0.1, 0.4, 0.2], 2) + np.tile([0.1, -0.1], 4)
    after = np.array([0.25, 0.04, 0.35, 0.14])
    assert _less(before, after)
    assert not _less(after, before)
    assert not _less(before, after[:3])  # nothing that belongs together
