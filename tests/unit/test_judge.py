"""A fold's error is that of its own activations, and it never leaves a consumer worse than plain folding."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.fit.judge import judge
from onnxgrail.core import Floats, Reducer, Stats, View
from tests.unit.algebra_builders import matrix_of, stats_of, view_of, weights_of

FOLD = Reducer(kept=np.array([0, 1, 3]), cluster=np.array([0, 1, 0, 2, 1, 2]))


def folded(seed: int) -> tuple[View, Floats, Floats]:
    """A block with a ReLU: its view, its activations, and those of the folded producer."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((50, 4))
    producer = rng.standard_normal((6, 1, 4))
    x = np.maximum(z @ producer[:, 0].T, 0.0)
    view = view_of([("producer", producer), ("consumer", rng.standard_normal((6, 1, 3)))], [x])
    return view, x, np.maximum(z @ (matrix_of(FOLD, 6) @ producer[:, 0]).T, 0.0)


def joint(x: Floats, y: Floats) -> Stats:
    return stats_of(np.concatenate([x, y], axis=1))


def error(view: View, x: Floats, y: Floats, narrow: Floats) -> float:
    want = x @ view.weights[1][:, 0]
    return float(((want - y @ narrow[:, 0]) ** 2).sum() / (want**2).sum())


@pytest.mark.parametrize("seed", range(4))
def test_errors_are_those_of_the_folded_network(seed: int) -> None:
    view, x, y = folded(seed)
    plain = COMPENSATORS["none"](view, FOLD)
    found = judge(view, plain, [joint(x, y)])
    assert found.error.compensated is None
    assert found.error.plain == pytest.approx(error(view, x, y, weights_of(plain, view, 1)))
    fitted = COMPENSATORS["grail"](view, FOLD)
    judged = judge(view, fitted, [joint(x, y)])
    true = error(view, x, y, weights_of(judged, view, 1))
    assert judged.error.compensated == pytest.approx(true)
    assert fitted.error.compensated is not None
    assert fitted.error.compensated != pytest.approx(true, rel=1e-3)  # what averages promised
    assert true <= error(view, x, y, weights_of(plain, view, 1))


def test_a_compensation_that_does_harm_is_taken_back() -> None:
    view, x, _ = folded(0)
    plain, fitted = COMPENSATORS["none"](view, FOLD), COMPENSATORS["grail"](view, FOLD)
    exact = x @ view.weights[1][:, 0] @ np.linalg.pinv(weights_of(plain, view, 1)[:, 0])  # plain weights fit these
    judged = judge(view, fitted, [joint(x, exact)])
    assert judged.outcome.status == "plain"
    assert np.array_equal(weights_of(judged, view, 1), weights_of(plain, view, 1))
    assert judged.error.compensated == judged.error.plain
