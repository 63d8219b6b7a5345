"""Greedy elimination and exchanges against versions that solve everything anew at every step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.select import elimination as module
from onnxgrail.algebra.select.elimination import Removals, elimination
from onnxgrail.algebra.select.quadratic import quadratics
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.algebra.select.selectors.slimgpt import SlimGpt
from onnxgrail.core import Floats, Ints, Reducer, View
from onnxgrail.errors import DataError
from tests.unit.algebra_builders import mlp, view_of


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


def readers(rng: np.random.Generator, units: int = 9) -> View:
    """Two consumers after a probe of whole heads, one after a pooled probe."""
    weights = [rng.standard_normal((units, 2, r)) for r in (4, 3, 2)]
    wide = rng.standard_normal((80, 2 * units)) @ rng.standard_normal((2 * units, 2 * units))
    pooled = np.maximum(rng.standard_normal((60, units)), 0.0) * 4.0
    return view_of([("consumer", w) for w in weights], [wide, pooled], feeds=[0, 0, 1], pooled=[False, True])


def loss(view: View, kept: list[int], alpha: float = 1e-3) -> float:
    """The penalised squared output error, from rows of least squares and nothing shared with the code."""
    total = 0.0
    for place, stats in enumerate(view.stats):
        h = len(stats.gram)
        size = h // view.block.units
        C = np.concatenate([w.reshape(h, -1) for s, w in view.of("consumer") if s.probe == place], axis=1)
        root = np.linalg.cholesky(stats.gram + alpha * np.trace(stats.gram) / h * np.eye(h)).T
        columns = [unit * size + member for unit in kept for member in range(size)]
        fit = np.linalg.lstsq(root[:, columns], root @ C, rcond=None)[0] if kept else np.zeros((0, C.shape[1]))
        total += float(np.square(root @ C - root[:, columns] @ fit).sum())
    return total


def naive(view: View) -> tuple[list[int], list[float]]:
    """Try every unit at every step, with a full refit."""
    alive, order, losses = list(range(view.block.units)), [], [0.0]
    while alive:
        tried = [loss(view, [a for a in alive if a != unit]) for unit in alive]
        order.append(alive.pop(int(np.argmin(tried))))
        losses.append(min(tried))
    return order, losses


def losses(found: Removals) -> Floats:
    """The loss with the k units that are removed last, for k = 0 ... u."""
    return np.cumsum([0.0, *found.costs])[::-1]


def best(found: Removals, count: int) -> Ints:
    """The units that stay longest."""
    return np.sort(found.order[len(found.order) - count :])


def agrees(got: Removals, want: tuple[list[int], list[float]]) -> None:
    assert got.order.tolist() == want[0]
    np.testing.assert_allclose(losses(got)[::-1], want[1], rtol=1e-9, atol=1e-10 * got.energy)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("panel", [1, 7, 128])
def test_elimination_is_the_naive_one(
    members: int, panel: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PANEL", panel)
    view = mlp(rng, units=13, members=members, rows=90)
    agrees(elimination(view), naive(view))


@pytest.mark.parametrize("selector", ["obs", "slimgpt"])
@pytest.mark.parametrize("kept", [1, 4, 9, 12])
def test_units_that_stay_are_not_ordered(
    selector: str, kept: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PANEL", 3)
    view = mlp(rng, units=13, rows=90)
    every, some = (SELECTORS[selector](one, rng) for one in (view, replace(view, kept=kept)))
    gone = every < 13 - kept
    np.testing.assert_array_equal(some[gone], every[gone])
    assert np.flatnonzero(~gone).tolist() == np.argsort(some)[-kept:][::-1].tolist()  # the lower index scores higher


def test_losses_of_several_consumers_and_probes_add_up(rng: np.random.Generator) -> None:
    view = readers(rng)
    agrees(elimination(view), naive(view))


def test_nothing_kept_loses_the_whole_output(rng: np.random.Generator) -> None:
    found = elimination(readers(rng))
    assert losses(found)[0] == pytest.approx(found.energy, rel=1e-12)
    assert (found.costs >= 0.0).all()


def test_the_loss_bounds_what_a_refit_leaves(rng: np.random.Generator) -> None:
    view = mlp(rng, units=12, rows=300)
    found = elimination(view)
    energy = sum(float(np.trace(q.columns.T @ view.stats[0].gram @ q.columns)) for q in quadratics(view, 1e-3))
    for kept in (3, 6, 11):
        error = Grail(alpha=0.0)(view, Reducer(kept=best(found, kept))).error.compensated
        assert error is not None
        assert error * energy <= losses(found)[kept] * (1 + 1e-9) <= error * energy + 0.05 * energy


@pytest.mark.parametrize("selector", ["obs", "slimgpt"])
def test_duplicates_go_first_and_cost_nothing(selector: str, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((200, 6))
    source = np.array([0, 1, 2, 3, 4, 5, 0, 2, 2, 5])
    consumer = rng.standard_normal((10, 1, 4)) * 3.0
    view = view_of([("consumer", consumer)], [rows[:, source] * 10.0])
    kept = np.argsort(SELECTORS[selector](view, rng))[4:]
    assert sorted(source[kept].tolist()) == [0, 1, 2, 3, 4, 5]
    found = elimination(view, alpha=1e-9)
    assert sorted(source[best(found, 6)].tolist()) == [0, 1, 2, 3, 4, 5]
    assert losses(found)[6] < 1e-8 * found.energy
    assert losses(found)[5] > 1e-2 * found.energy


def test_among_equals_the_lower_index_stays(rng: np.random.Generator) -> None:
    rows = rng.standard_normal((200, 3))[:, [0, 1, 0, 1, 0, 2]]
    view = view_of([("consumer", np.ones((6, 1, 2)))], [rows])
    assert best(elimination(view), 3).tolist() == [0, 1, 5]


@pytest.mark.parametrize("selector", ["obs", "slimgpt", "flap", "gram"])
def test_silent_units_go_first_whatever_their_weights(selector: str, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((50, 6))
    rows[:, [1, 4]] = 0.0
    weights = np.ones((6, 1, 3))
    weights[[1, 4]] = 1e6
    scores = SELECTORS[selector](view_of([("consumer", weights)], [rows]), rng)
    assert np.sort(np.argsort(-scores, kind="stable")[:4]).tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize("selector", ["obs", "slimgpt"])
def test_nothing_but_zeros_keeps_the_lower_units(selector: str, rng: np.random.Generator) -> None:
    view = view_of([("consumer", np.ones((5, 1, 2)))], [np.zeros((9, 5))])
    assert SELECTORS[selector](view, rng).tolist() == [4.0, 3.0, 2.0, 1.0, 0.0]
    found = elimination(view)
    assert found.order.tolist() == [4, 3, 2, 1, 0]
    assert not found.costs.any()


def test_rounding_below_zero_is_met_by_a_larger_ridge(rng: np.random.Generator) -> None:
    view = mlp(rng, units=6)
    gram = view.stats[0].gram
    gram = gram - (np.linalg.eigvalsh(gram)[0] + 0.005 * np.trace(gram) / 6) * np.eye(6)  # five times the ridge below 0
    assert sorted(elimination(replace(view, stats=(replace(view.stats[0], gram=gram),))).order) == list(range(6))


@pytest.mark.parametrize("selector", ["obs", "slimgpt"])
def test_not_finite_is_an_error(selector: str, rng: np.random.Generator) -> None:
    view = mlp(rng)
    broken = replace(view, stats=(replace(view.stats[0], gram=view.stats[0].gram * np.nan),))
    with pytest.raises(DataError, match="'block' have no inverse"):
        SELECTORS[selector](broken, rng)


def test_obs_scores_are_places_in_the_order(rng: np.random.Generator) -> None:
    view = mlp(rng, units=10)
    assert np.argsort(SELECTORS["obs"](view, rng)).tolist() == elimination(view).order.tolist()


def slim(view: View, batches: list[int], damping: float = 0.01) -> list[int]:
    """The published loop for units of one feature: inverse anew, scores, the cheapest batch out."""
    h = view.block.units
    gram, W = view.stats[0].gram, view.weights[-1].reshape(h, -1).T.copy()
    H = gram + damping * np.trace(gram) / h * np.eye(h)
    alive, order = np.arange(h), []
    for batch in batches:
        inverse = np.linalg.inv(H[np.ix_(alive, alive)])
        errors = np.square(W[:, alive]).sum(axis=0) / np.diagonal(inverse)
        out = np.argsort(errors)[:batch]
        for i in range(batch):  # one after the other: what the last removal does to the columns of the next
            column, inner = alive[out[i]], np.linalg.inv(H[np.ix_(alive, alive)])
            place = int(np.flatnonzero(alive == column)[0])
            W[:, alive] -= np.outer(W[:, column], inner[place] / inner[place, place])
            order.append(int(column))
            alive = np.delete(alive, place)
            out = np.where(out > place, out - 1, out)
    return order


def test_slimgpt_is_the_published_loop(rng: np.random.Generator) -> None:
    view = mlp(rng, units=40, rows=300)
    scores = SlimGpt(smallest=2)(view, rng)
    assert np.argsort(scores).tolist() == slim(view, [5, 2, 2, 2, 2, *[2] * 13, 1])
    assert np.argsort(SlimGpt(largest=3, smallest=1)(view, rng)).tolist() == slim(view, [3, *[1] * 37])


def test_slimgpt_of_heads_is_greedy(rng: np.random.Generator) -> None:
    view = mlp(rng, units=7, members=4, rows=200)
    want = elimination(view, alpha=0.01).order
    assert np.argsort(SELECTORS["slimgpt"](view, rng)).tolist() == want.tolist()


def scaled(view: View, unit: float) -> Floats:
    stats = tuple(replace(s, gram=s.gram * unit**2, total=s.total * unit) for s in view.stats)
    return losses(elimination(replace(view, stats=stats)))


def test_losses_follow_the_scale_of_activations(rng: np.random.Generator) -> None:
    view = mlp(rng)
    np.testing.assert_allclose(scaled(view, 1e-4), 1e-8 * scaled(view, 1.0), rtol=1e-6, atol=0)
