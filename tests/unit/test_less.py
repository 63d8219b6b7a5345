"""Losses of candidates are compared, and outputs without values have none."""

from __future__ import annotations

import numpy as np

from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.loss import losses_of, worst_loss
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


def test_an_empty_output_loses_nothing() -> None:
    """Some exporters leave such outputs, as of a loop that never runs."""
    rng = np.random.default_rng(0)
    y, nothing = rng.normal(size=(8, 5)), np.zeros(0)
    first = Tally(brief=True)
    first.add({"nothing": nothing, "y": y}, {"nothing": nothing, "y": y})
    first.tables()
    tally = Tally(known=first.known, brief=True)
    tally.add({"nothing": nothing, "y": y}, {"nothing": nothing, "y": y + 0.01})
    (loss,) = losses_of(tally)
    assert (loss.output, len(loss.values)) == ("y", 8)
    alone = Tally(known=first.known, brief=True)
    alone.add({"nothing": nothing}, {"nothing": nothing})
    assert worst_loss(alone) is None
