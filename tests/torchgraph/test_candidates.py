"""Candidates of a fit besides the weights after an epoch: their mean, and parts of the way to the best."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from onnxgrail.torchgraph import fit as fitting
from tests.torchgraph.test_fit import run_fit


def way(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weights after every step of what is fitted from here on."""
    passed, step = list[Any](), fitting._Fitted.step
    spy = lambda self, *given: (step(self, *given), passed.append(self.weights["w"].detach().numpy().copy()))  # noqa: E731
    monkeypatch.setattr(fitting._Fitted, "step", spy)
    return passed


def test_the_mean_of_the_way_is_kept_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = way(monkeypatch)
    monkeypatch.setattr(
        fitting._Fitted, "error", lambda self, _, weights: 1 / (1 + self.taken) if weights is self.mean else 1.0
    )
    _, found, _ = run_fit(steps=10, epochs=2)
    assert found.after == pytest.approx(1 / 11)
    np.testing.assert_allclose(found.arrays["w"], np.average(passed, axis=0, weights=range(1, 11)), rtol=1e-4)


def test_a_part_of_the_way_is_kept_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, parts = way(monkeypatch), iter([0.9, 0.1, 0.3])

    def error(self: Any, _: Any, weights: Any) -> float:
        if weights is self.mean:
            return 0.7
        return next(parts) if weights is not self.weights else 0.5 if self.taken else 1.0

    monkeypatch.setattr(fitting._Fitted, "error", error)
    model, found, _ = run_fit(steps=5, epochs=1)
    start = model.graph.initializers["w"].const_value.numpy()
    assert found.after == 0.1
    np.testing.assert_allclose(found.arrays["w"], start + fitting.PARTS[1] * (passed[-1] - start), rtol=1e-4)
