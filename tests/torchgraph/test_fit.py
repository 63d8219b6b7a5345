"""Fits of single weights by gradient: they find the weights of the goals, whatever stands at padded positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

from onnxgrail.torchgraph import fit as fitting
from onnxgrail.torchgraph.fit import Batch, Samples, Settings, fit
from onnxgrail.torchgraph.program import program_of, tensors
from tests.tiny import tiny
from tests.torchgraph.test_refine import data


def piece_and_batches() -> tuple[ir.Model, list[Callable[[], Batch]]]:
    model = tiny("float[N,4] x => float[N,3] y", "y = MatMul(x, w)", {"w": (4, 3)})
    truth = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)
    made = [data(16, 4, seed=k)["x"] for k in range(6)]
    return model, [lambda x=x: Batch(inputs={"x": x}, goals={"y": x @ truth}) for x in made]


def run_fit(**settings: Any) -> tuple[ir.Model, fitting.Fit, list[Callable[[], Batch]]]:
    model, batches = piece_and_batches()
    expected = program_of(model).run(tensors(batches[0]().inputs))["y"].numpy()
    chosen = Settings(**{"rate": 0.1, "steps": 400, **settings})
    found = fit(model, ["w"], Samples(batches[:5], batches[5:]), chosen, expected={"y": expected}, tick=lambda: None)
    return model, found, batches


def test_a_fit_finds_the_weights_behind_the_goals() -> None:
    model, found, batches = run_fit()
    assert found.after < 1e-4 < found.before
    held = batches[5]()
    wrong = held.inputs["x"] @ found.arrays["w"] - held.goals["y"]
    energy = np.mean([np.square(b().goals["y"]).mean() for b in batches[:5]])
    assert np.square(wrong).mean() / energy == pytest.approx(found.after, rel=1e-3)
    assert found.before == pytest.approx(
        np.square(held.inputs["x"] @ model.graph.initializers["w"].const_value.numpy() - held.goals["y"]).mean()
        / energy,
        rel=1e-3,
    )


@pytest.mark.parametrize(("seconds", "most"), [(None, 2 * fitting.LOOKS), (1e6, 2 * 80)])
def test_a_long_descent_is_evaluated_a_few_times_unless_it_may_end_at_any_epoch(
    seconds: float | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 steps over five batches are 80 epochs; the last one is always evaluated."""
    seen: list[int] = []
    real = fitting._Fitted.error
    monkeypatch.setattr(fitting._Fitted, "error", lambda self, *given: seen.append(self.taken) or real(self, *given))
    _, found, _ = run_fit(seconds=seconds)
    assert found.epochs == 80
    looked = [taken for taken in seen if taken]
    assert max(looked) == 400
    assert len(looked) == most + len(fitting.PARTS)


def test_padding_is_left_out_of_a_fit() -> None:
    """Goals at padded positions are nonsense here, and the fit does not notice."""
    model = tiny("float[N,5,4] x => float[] y", "y = MatMul(x, w)", {"w": (4, 3)}, recorded=False)
    rng, truth, batches = np.random.default_rng(2), np.random.default_rng(3).normal(size=(4, 3)), []
    for _ in range(6):
        x = rng.normal(size=(8, 5, 4)).astype(np.float32)
        mask = rng.random((8, 5)) < 0.6
        goal = np.where(mask[..., None], x @ truth, 1e3).astype(np.float32)
        batches.append(lambda x=x, goal=goal, mask=mask: Batch(inputs={"x": x}, goals={"y": goal}, mask=mask))
    expected = program_of(model).run(tensors(batches[0]().inputs))["y"].numpy()
    settings = Settings(rate=0.1, steps=1500)
    found = fit(model, ["w"], Samples(batches[:5], batches[5:]), settings, expected={"y": expected}, tick=lambda: None)
    np.testing.assert_allclose(found.arrays["w"], truth, atol=0.05)
