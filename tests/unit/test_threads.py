"""One number of threads for the runtime and for BLAS."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from onnxgrail.calibration.runtime import threads
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.graph.io.serial import LARGE, pack, to_bytes
from onnxgrail.machine.group.sums import SOLO, Shard, shard_of
from tests.tiny import feed, mlp


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    threads.count.cache_clear()
    yield
    threads.count.cache_clear()


@pytest.mark.parametrize(("value", "wanted"), [("3", 3), ("3,2", 3)])
def test_the_environment_says_how_many(value: str, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads.count() == wanted


@pytest.mark.parametrize("value", ["", "0", "many"])
def test_else_the_cores_of_this_process(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "_core", lambda number: str(number // 2))
    assert threads.count() == 2


def test_blas_is_held_to_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    def widths() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    before = widths()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with threads.pinned():
        assert widths() == {1}
    assert widths() == before


def test_large_weights_travel_beside_the_bytes() -> None:
    model = mlp(2, 192, features=192)
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    packed = pack(model)
    assert set(packed.weights) == {n for n, t in tensors.items() if t is not None and t.nbytes >= LARGE}
    assert packed.weights
    assert len(packed.data) < sum(array.nbytes for array in packed.weights.values())
    assert all(model.graph.initializers[name].const_value is tensor for name, tensor in tensors.items())
    arrays = feed(model)
    with open_session(packed) as one, open_session(to_bytes(model)) as two:
        got, wanted = one.run(arrays), two.run(arrays)
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("total", ["1", "2"])
def test_results_come_in_order_each_made_once(total: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", total)
    made: list[int] = []
    found = list(threads.ahead(lambda n: made.append(n) or n * n, range(5)))  # type: ignore[func-returns-value]
    assert found == [0, 1, 4, 9, 16]
    assert made == [0, 1, 2, 3, 4]
    assert list(threads.ahead(str, [])) == []


def test_the_next_result_is_made_while_the_caller_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    begun = [threading.Event() for _ in range(3)]
    results = threads.ahead(lambda n: begun[n].set(), range(3))
    next(results)
    assert begun[1].wait(10), "only made when asked for"
    results.close()
    assert not begun[2].is_set()


def test_a_failure_arrives_with_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    results = threads.ahead(lambda n: 1 // n, [1, 0])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def shard(total: int) -> Shard:
    return shard_of(SOLO, total)


@pytest.mark.parametrize(
    ("total", "room", "wanted"), [("1", 0, 1), ("4", 0, 4), ("64", 0, 8), ("4", threads.ROOM, 2), ("4", 2**40, 1)]
)
def test_in_how_many_parts(total: str, room: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as threads and stretches of batches, if there is room for their sums."""
    monkeypatch.setenv("OMP_NUM_THREADS", total)
    assert threads.ways(shard(32), room) == wanted


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_come_in_order(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with threads.pinned():
        found = threads.share(shard(9), parts, lambda n: n * n, lambda part, made: (part.numbers, list(made)))
        assert all(lib["num_threads"] == 1 for lib in threadpool_info() if lib["user_api"] == "blas")
    assert len(found) == parts
    assert [n for numbers, _ in found for n in numbers] == list(range(9))
    assert [n for _, made in found for n in made] == [n * n for n in range(9)]


def test_parts_go_side_by_side_and_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other; where one fails, the other one stops, and the failure arrives."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    meeting = threading.Barrier(2, timeout=10)
    made: list[int] = []

    def step(place: int) -> None:
        made.append(place)
        meeting.wait()

    def work(part: Shard, walked: Iterator[None]) -> None:
        next(walked)
        if part.numbers[0] == 0:
            raise ZeroDivisionError
        time.sleep(0.2)
        list(walked)

    with pytest.raises(ZeroDivisionError):
        threads.share(shard(16), 2, step, work)
    assert sorted(made) == [0, 8]


def test_an_interrupt_while_parts_are_handed_out_ends_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    made: list[int] = []
    begun = threading.Event()
    submit = threads.ThreadPoolExecutor.submit

    def step(place: int) -> None:
        made.append(place)
        begun.set()
        time.sleep(0.05)

    def interrupted(*words: object) -> object:
        if begun.is_set():
            raise KeyboardInterrupt
        found = submit(*words)  # type: ignore[arg-type]
        assert begun.wait(10)
        return found

    monkeypatch.setattr(threads.ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads.share(shard(64), 2, step, lambda _, walked: list(walked))
    assert len(made) < 32, "the first part was gone through"


@pytest.mark.parametrize(("cores", "wanted"), [("1", 1), ("2", 2), ("3", 3), ("4", 1)])
def test_solutions_are_made_side_by_side_where_blas_has_one_thread(
    cores: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", cores)
    assert threads.of_solving() == wanted
