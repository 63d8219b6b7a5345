"""`--compensate best` against its formula: every reader fitted, on all rows at once, behind the ones already fitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.core import silent
from onnxgrail.decision import Decision, decide
from onnxgrail.preparation import Clock, prepare
from onnxgrail.recipe import recipe_of
from tests.tiny import tiny

ROWS, WIDTH, HIDDEN = 200, 6, 16
RIDGE = 0.1  # of the weights to begin with: strong enough to leave room for the fit


def net() -> Any:
    """Two layers beside a residual connection: hidden = relu(stream w), stream + hidden v."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (WIDTH, HIDDEN), "v0": (HIDDEN, WIDTH), "w1": (WIDTH, HIDDEN), "v1": (HIDDEN, WIDTH)}
    weights: dict[str, Any] = {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}
    text = """
        a = MatMul(x, w0)
        h0 = Relu(a)
        b = MatMul(h0, v0)
        s = Add(b, x)
        c = MatMul(s, w1)
        h1 = Relu(c)
        d = MatMul(h1, v1)
        y = Add(d, s)
    """
    return ir.to_proto(tiny("double[N,6] x => double[N,6] y", text, weights)), weights


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, Any], Any, Decision]:
    model, weights = net()
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)) + 1.0  # so that a bias pays
    choices = {"compensate": "best", "ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "samples": ROWS, "ridge": RIDGE}
    recipe = recipe_of(choices)
    return weights, x, decide(prepare(model, {"x": x}, recipe, Clock()), recipe, Clock(), silent)


def fitted(z: Any, target: Any, start: Any, alpha: float) -> tuple[Any, Any]:
    """Ridge around a start, with a bias that is free: both sides centred."""
    lam = alpha * np.square(z).sum() / z.shape[1]
    centred, mean = z - z.mean(axis=0), target.mean(axis=0)
    gram = centred.T @ centred + lam * np.eye(z.shape[1])
    weights = np.linalg.solve(gram, centred.T @ (target - mean) + lam * start)
    return weights, mean - z.mean(axis=0) @ weights


def test_weights_are_those_of_the_formula(made: tuple[dict[str, Any], Any, Decision]) -> None:
    weights, x, decision = made
    assert [refit.weight for refit in decision.refits] == ["v0", "v1"]
    stream = dense = x
    for k, (change, refit) in enumerate(zip(decision.changes, decision.refits, strict=True)):
        w, v, kept = weights[f"w{k}"], weights[f"v{k}"], change.reducer.kept
        assert len(kept) == HIDDEN // 2
        hidden, whole = np.maximum(dense @ w, 0), np.maximum(stream @ w, 0)
        dense = dense + hidden @ v
        z, far, near = whole[:, kept], dense - stream, whole @ v
        assert refit.alpha is not None
        assert np.isfinite(refit.alpha)
        target = refit.blend * far + (1 - refit.blend) * near
        gram = hidden.T @ hidden
        small = gram[np.ix_(kept, kept)]
        lam = RIDGE * np.trace(small) / len(kept)
        grail = np.linalg.solve(small + lam * np.eye(len(kept)), gram[kept] @ v)
        ways = [fitted(z, target, start, refit.alpha) for start in (grail, v[kept])]
        got, shift = decision.ledger.arrays[f"v{k}"][kept], decision.ledger.shifts[refit.node]
        gaps = [max(np.abs(got - a).max(), np.abs(shift - b).max()) for a, b in ways]
        assert min(gaps) < 1e-5, gaps
        stream = stream + z @ got + shift


def test_it_is_closer_than_what_is_fitted_block_by_block(made: tuple[dict[str, Any], Any, Decision]) -> None:
    assert all(refit.after < refit.before for refit in made[2].refits)
