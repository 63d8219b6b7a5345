"""Verdicts in words."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.words import extent

ONE_CLASS = "all samples of one class"


@pytest.mark.parametrize(("classes", "samples", "told"), [(1, 8, True), (2, 8, False), (1, 7, False)])
def test_samples_of_one_class_are_told(classes: int, samples: int, told: bool) -> None:
    scores = 9 * np.eye(4)[np.arange(samples) % classes + 1]
    for array in (scores, scores[:, :1] * 0 + 3.0 * (np.arange(samples)[:, None] % classes) - 1):
        tally = Tally()
        tally.add({"score": array}, {"score": array})
        (verdict,) = [verdict for verdict in tally.results()[0].verdicts if verdict.kind == "classes"]
        assert (ONE_CLASS in extent(asdict(verdict))) is told
