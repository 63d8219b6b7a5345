"""Errors that come from some of the outputs, against those of decisions."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.fit.compensate.plain import Plain
from onnxgrail.algebra.fit.normal import SOME
from onnxgrail.core import Reducer, View
from tests.unit.algebra_builders import view_of

UNITS = 24
PRUNED = Reducer(kept=np.arange(0, UNITS, 2))
FOLDED = Reducer(kept=np.arange(UNITS // 2), cluster=np.tile(np.arange(UNITS // 2), 2))
EVERY = [
    pytest.param(one, r, id=f"{type(one).__name__} {n}")
    for one in (Grail(), Plain())
    for n, r in [("prune", PRUNED), ("fold", FOLDED)]
]


def view(outputs: list[int], scales: list[float]) -> View:
    """Return a block with consumers of so many outputs, all of which read the same rows."""
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((300, 6)) @ rng.standard_normal((6, UNITS)) + 0.3 * rng.standard_normal((300, UNITS))
    layers = [
        ("consumer", scale * rng.standard_normal((UNITS, 1, n))) for n, scale in zip(outputs, scales, strict=True)
    ]
    return view_of([("producer", np.ones((UNITS, 1, 2))), *layers], [rows])


@pytest.mark.parametrize(("compensator", "reducer"), EVERY)
def test_errors_of_few_outputs_are_those_of_a_decision(compensator: Grail | Plain, reducer: Reducer) -> None:
    small = view([SOME // 2, SOME // 2], [1.0, 2.0])
    assert compensator.error(small, reducer) == compensator(small, reducer).error


@pytest.mark.parametrize(("compensator", "reducer"), EVERY)
@pytest.mark.parametrize(
    ("outputs", "scales"), [([3000], [1.0]), ([1500, 4], [1.0, 20.0])], ids=["one layer", "a small layer with much"]
)
def test_some_outputs_stand_for_all(
    outputs: list[int], scales: list[float], compensator: Grail | Plain, reducer: Reducer
) -> None:
    wide = view(outputs, scales)
    full, brief = compensator(wide, reducer).error, compensator.error(wide, reducer)
    assert (brief.compensated is None) == (full.compensated is None)
    assert full.plain is not None
    assert brief.plain == pytest.approx(full.plain, rel=0.1)
    if full.compensated is not None:
        assert brief.compensated == pytest.approx(full.compensated, rel=0.1)


def test_without_second_moments_there_is_no_error() -> None:
    bare = view_of([("producer", np.ones((UNITS, 1, 2))), ("consumer", np.ones((UNITS, 1, 3)))])
    assert Grail().error(bare, PRUNED).plain is None
    assert Plain().error(bare, PRUNED).plain is None
