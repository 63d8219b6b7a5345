"""Products and solutions that several processes compute together, bit for bit as one does alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.fit.choice import Rules
from onnxgrail.algebra.fit.refit import refit
from onnxgrail.algebra.moments.regression import moments
from onnxgrail.algebra.solve import linear as host
from onnxgrail.algebra.solve import shared
from onnxgrail.algebra.solve.linear import HOST, Host, linear, using
from onnxgrail.algebra.solve.ridge import ridge_solve
from onnxgrail.algebra.solve.shared import crew_of, each, together
from onnxgrail.errors import LostProcessError
from onnxgrail.machine.group.sums import SOLO, Group
from tests.unit.members import played

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((700, 320))
SINGLE = ROWS.astype(np.float32)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that small matrices reach, and factors in blocks."""
    for module, name, value in ((shared, "MUCH", 1), (shared, "DEEP", 1), (host, "WHOLE", 64), (host, "BLOCK", 32)):
        monkeypatch.setattr(module, name, value)


def gram(rows: np.ndarray) -> np.ndarray:
    return rows.T @ rows + np.eye(rows.shape[1], dtype=rows.dtype)


def fitted(rows: np.ndarray) -> list[np.ndarray]:
    """Two layers fitted to noisy targets, judged by a fourth of the rows."""
    weights = np.random.default_rng(1).standard_normal((rows.shape[1], 300))
    targets = rows @ weights + np.random.default_rng(2).standard_normal((len(rows), 300))
    folds = [moments(rows[: 3 * len(rows) // 4], targets[: 3 * len(rows) // 4])]
    folds.append(moments(rows[3 * len(rows) // 4 :], targets[3 * len(rows) // 4 :]))
    starts = [[0.5 * weights[:, :100]], [0 * weights[:, 100:], 0.9 * weights[:, 100:]]]
    found = refit(folds, starts, Rules(affine=True))
    assert any(one.blend for one in found)
    numbers = [np.array([one.alpha or 0.0, one.blend, one.before, one.after]) for one in found]
    return [*(one.weights for one in found), *numbers]


CASES: dict[str, Callable[[], Any]] = {
    "product": lambda: linear().product(ROWS.T, ROWS),
    "product of columns": lambda: linear().product(SINGLE.T[:, ::2], SINGLE[::2, :130]),
    "solution": lambda: linear().cholesky(gram(ROWS)).solve(ROWS[:320, :300].copy()),
    "one column": lambda: linear().cholesky(gram(ROWS)).solve(ROWS[:320, 0]),
    "float32": lambda: linear().cholesky(gram(SINGLE)).solve(ROWS[:320, :300]),
    "inverse": lambda: linear().inverse(gram(ROWS)),
    "ridge": lambda: ridge_solve(gram(SINGLE), SINGLE[:320, :200], 1e-3)[0],
    "fit": lambda: np.concatenate([array.ravel() for array in fitted(ROWS[:, :64])]),
    "fit of few layers": lambda: np.concatenate([array.ravel() for array in fitted(ROWS)]),
}


@pytest.mark.parametrize("name", CASES)
def test_several_processes_compute_the_bits_of_one(name: str) -> None:
    wanted = CASES[name]()
    for size in (2, 3, 4):

        def work(group: Group, size: int = size) -> tuple[np.ndarray, int]:
            with together(group, size):
                return CASES[name](), group._exchanges  # type: ignore[attr-defined]

        for found, exchanges in played(size, work):
            assert found.dtype == wanted.dtype
            assert found.tobytes() == wanted.tobytes()
            assert exchanges


@pytest.mark.parametrize("size", [2, 3])
def test_items_are_made_by_their_process(size: int) -> None:
    """Several at a time, and alone: what an item computes is not shared."""

    def work(group: Group) -> tuple[list[int], list[float], bool]:
        mine, alone = [], True

        def make(item: int) -> np.ndarray:
            nonlocal alone
            mine.append(item)
            alone = alone and type(linear()) is Host
            return np.full((1, 2), item + 0.5)

        with together(group, size):
            found = []
            for array in each([0, 1, 2, 5, 7], make):
                found.append(float(array.ravel()[1]))
                if len(found) == 4:
                    break
            assert type(linear()) is shared.Shared
        return mine, found, alone

    for rank, (mine, found, alone) in enumerate(played(size, work)):
        assert found == [0.5, 1.5, 2.5, 5.5]
        assert alone
        asked = [0, 1, 2, 5] if size == 2 else [0, 1, 2, 5, 7]
        assert mine == [item for item in asked if item % size == rank]


def test_one_process_makes_only_the_items_that_are_asked_for() -> None:
    made: list[int] = []
    found = each([3, 4, 5], lambda item: made.append(item) or np.zeros(1))  # type: ignore[func-returns-value]
    next(found)
    assert made == [3]


def test_small_operations_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MUCH", 2**30)

    def work(group: Group) -> int:
        with together(group, 2):
            CASES["product"]()
            return group._exchanges  # type: ignore[attr-defined, no-any-return]

    assert played(2, work) == [0, 0]


def test_processes_that_are_not_alike_do_not_solve_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(3, crew_of) == [3, 3, 3]
    assert played(5, crew_of) == [4] * 5
    assert crew_of(SOLO) == 1
    assert played(2, lambda group: _with(Host(1 + group.rank), group)) == [2, 2], "threads change no bits"

    class Device:
        """A backend that is not the host."""

    assert played(2, lambda group: _with(Device(), group)) == [1, 1]
    assert played(2, lambda group: _with(HOST if group.rank else Device(), group)) == [1, 1]
    monkeypatch.setattr(shared, "_libraries", lambda: str(threading.get_ident()))
    assert played(2, crew_of) == [1, 1]


def _with(backend: Any, group: Group) -> int:
    with using(backend):
        return crew_of(group)


def test_alone_nothing_changes() -> None:
    with together(SOLO, 1):
        assert linear() is HOST


def test_processes_that_compute_something_else_are_noticed() -> None:
    def work(group: Group) -> None:
        with together(group, 2):
            CASES["product"]()
            if group.rank:
                CASES["product"]()
            group.exchange([], 2)
            group.exchange([], 2)

    with pytest.raises((LostProcessError, ValueError)):
        played(2, work)
