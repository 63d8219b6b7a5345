"""Error curves and standardised scores against their definitions, written out."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.method import reduce_and_compensate
from onnxgrail.algebra.moments.curves import error_curve, fluctuation
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.core import View
from tests.unit.algebra_builders import mlp, view_of


def error_at(view: View, kept: int, compensate: str = "grail") -> float:
    change = reduce_and_compensate(
        view,
        kept,
        selector=SELECTORS["wanda"],
        reducer=REDUCERS["prune"],
        compensator=COMPENSATORS[compensate],
        rng=np.random.default_rng(0),
    )
    measured = change.error.compensated if compensate == "grail" else change.error.plain
    return measured or 0.0


@pytest.mark.parametrize("compensate", ["grail", "none"])
def test_the_curve_falls_from_one_to_zero_through_measured_errors(compensate: str) -> None:
    view = mlp(np.random.default_rng(0), units=32, rows=200)
    curve = error_curve(view, lambda v, k: error_at(v, k, compensate))
    assert curve.shape == (33,)
    assert (curve[0], curve[-1]) == (1.0, 0.0)
    assert (np.diff(curve) <= 1e-12).all()
    for kept in (8, 16, 24):
        measured = min(error_at(view, kept, compensate), 1.0)
        assert curve[kept] >= measured - 1e-12  # more only where the measured errors rise
    assert error_curve(view, error_at)[16] < 1.0


def test_a_block_of_two_units_has_a_curve() -> None:
    assert error_curve(mlp(np.random.default_rng(0), units=2), error_at).shape == (3,)


def test_silent_consumers_make_no_error() -> None:
    view = mlp(np.random.default_rng(0), units=8)
    quiet = view_of([("producer", np.ones((8, 1, 3))), ("consumer", np.zeros((8, 1, 2)))], [np.ones((20, 8))])
    assert error_curve(quiet, error_at)[1:].max() == 0.0
    assert error_curve(view, error_at)[1:].max() > 0.0


def test_scores_are_z_scores_of_variance_times_weight() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, 6)) * np.arange(1, 7) + 3.0
    weight = rng.standard_normal((6, 1, 4))
    scores = fluctuation(view_of([("producer", np.ones((6, 1, 2))), ("consumer", weight)], [x]))
    metric = x.var(axis=0) * (weight[:, 0] ** 2).sum(axis=1)
    np.testing.assert_allclose(scores, (metric - metric.mean()) / metric.std(ddof=1))


def test_a_unit_of_several_features_has_the_mean_of_their_scores() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((40, 6)), rng.standard_normal((3, 2, 4))
    view = view_of([("producer", np.ones((3, 2, 2))), ("consumer", weight)], [x], kind="heads")
    metric = x.var(axis=0) * (weight.reshape(6, 4) ** 2).sum(axis=1)
    standard = (metric - metric.mean()) / metric.std(ddof=1)
    np.testing.assert_allclose(fluctuation(view), standard.reshape(3, 2).mean(axis=1))


def test_units_that_are_alike_score_zero() -> None:
    view = view_of([("producer", np.ones((4, 1, 2))), ("consumer", np.ones((4, 1, 3)))], [np.ones((9, 4))])
    assert not fluctuation(view).any()
