"""Sums that do not depend on how many processes take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.moments import triangles
from onnxgrail.calibration.stream.totals import Totals
from onnxgrail.core import Probe, Stats
from onnxgrail.errors import DataError, LostProcessError
from onnxgrail.machine.group import torchrun
from onnxgrail.machine.group.sums import FIRST, LEAVES, SOLO, Group, Node, Owners, Shard, Tally, push, shard_of
from onnxgrail.machine.group.torchrun import Processes, partners
from onnxgrail.machine.steps.codec import Record
from tests.unit.members import played


def shards(size: int, total: int) -> list[Shard]:
    """Of all processes."""
    return [shard_of(Processes(None, rank, size), total) for rank in range(size)]


def values(total: int) -> list[np.ndarray]:
    """Numbers whose sum depends on the order in which they are added."""
    rng = np.random.default_rng(total)
    return [rng.standard_normal(5) * 10.0 ** rng.integers(-8, 8, 5) for _ in range(total)]


def summed(size: int, total: int, owner: int = 0) -> np.ndarray:
    numbers = values(total)

    def work(group: Group) -> np.ndarray:
        shard = shard_of(group, total)
        tally = Tally(shard)
        for number in shard.numbers:
            tally.add(number, [numbers[number].copy()])
        return tally.total([Owners(range(owner, owner + 1))])[0]

    found = played(size, work) if size > 1 else [work(SOLO)]
    assert [array.size > 0 for array in found] == [rank == owner for rank in range(size)]
    return found[owner]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 16, 31, 32, 33, 65, 100])
def test_every_number_of_processes_gives_the_same_bits(total: int) -> None:
    alone = summed(1, total)
    np.testing.assert_allclose(alone, np.sum(values(total), axis=0), rtol=1e-9, atol=1e-6)
    for size in (2, 3, 4, 5, 8, 40):
        assert summed(size, total).tobytes() == alone.tobytes(), size
        assert summed(size, total, size - 1).tobytes() == alone.tobytes(), size


@pytest.mark.parametrize("total", [1, 3, 16, 33])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_every_process_gets_the_sums_that_it_owns(size: int, total: int) -> None:
    """Whole ones and bytes go to one process each; several complete pieces of another sum, and share them."""
    numbers, crew = values(total), min(size, 4)
    owners = [Owners(range(n % size, n % size + 1)) for n in range(5)]
    owners += [Owners(range(crew)), Owners(range(crew)), Owners(range(crew), cut=False)]

    def work(group: Group) -> tuple[np.ndarray, ...]:
        shard = shard_of(group, total)
        tally = Tally(shard)
        for number in shard.numbers:
            arrays = [numbers[number] * (n + 1) for n in range(5)]
            wide = np.outer(numbers[number], np.arange(1.0, 8.0)) if number else np.zeros(0)  # a batch without rows
            tally.add(number, [*arrays, wide, numbers[number][:1].copy(), np.full(number, number, np.uint8)])
        return tally.total(owners)

    found = played(size, work) if size > 1 else [work(SOLO)]
    alone = summed(1, total)
    for rank, arrays in enumerate(found):
        for n, array in enumerate(arrays[:5]):
            assert array.size == (5 if n % size == rank else 0)
        np.testing.assert_array_equal(arrays[0], alone if rank == 0 else [])
        for array, want in zip(arrays[5:], found[0][5:], strict=True):
            np.testing.assert_array_equal(array.ravel(), want.ravel() if rank < crew else [])
    assert found[0][5].size == (35 if total > 1 else 0)
    np.testing.assert_array_equal(found[0][6], alone[:1])
    np.testing.assert_array_equal(found[0][7], np.concatenate([np.full(n, n) for n in range(total)]))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 33])
def test_all_processes_meet_in_pairs(count: int) -> None:
    for rank in range(count):
        assert sorted(partners(rank, count)) == [other for other in range(count) if other != rank]
    left = {rank: list(partners(rank, count)) for rank in range(count)}
    while any(left.values()):  # no circle of processes that wait for each other
        ready = [rank for rank, some in left.items() if some and left[some[0]][0] == rank]
        assert ready
        for rank in ready:
            left[rank].pop(0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_records_come_from_any_process(size: int) -> None:
    notes = {"numbers": [1, 2.5], "name": "ä"}
    arrays = {"bits": np.array([[True, False]]), "none": np.zeros((0, 3)), "one": np.array(3, np.int64)}

    def work(group: Group) -> list[Record | None]:
        mine = [
            Record(arrays=arrays, notes={**notes, "rank": group.rank}) if group.rank == n else None for n in range(size)
        ]
        return [group.share(mine[source], source) for source in range(size)] + [group.share(None, size - 1)]

    for found in played(size, work):
        assert found.pop() is None
        for source, record in enumerate(found):
            assert record is not None
            assert dict(record.notes) == {**notes, "rank": source}
            for name, array in arrays.items():
                assert record.arrays[name].dtype == array.dtype
                np.testing.assert_array_equal(record.arrays[name], array)


def test_processes_agree_on_a_text() -> None:
    assert played(3, lambda group: group.agree("same")) == [True] * 3
    assert played(3, lambda group: [group.agree(f"{group.rank // 2}"), group.agree("same")]) == [[False, True]] * 3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_reason_of_a_failing_process_ends_all(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the others wait: for sums, for parts of a solution, or for a decision."""
    monkeypatch.setattr(torchrun, "FAREWELL", 0.2)

    def work(group: Group, place: int) -> None:
        steps = [
            lambda: Tally(shard_of(group, 8)).total([Owners(range(size))]),
            lambda: group.exchange([], size),
            lambda: group.share(Record() if group.rank == size - 1 else None, size - 1),
        ]
        for number, step in enumerate(steps):
            if (number, group.rank) == (place, size - 1):
                raise DataError("no memory")
            step()

    for place in range(3):
        reasons: list[str] = []

        def caught(group: Group, place: int = place, reasons: list[str] = reasons) -> None:
            try:
                work(group, place)
            except (DataError, LostProcessError) as error:
                reasons.append(str(error))
                raise

        with pytest.raises((DataError, LostProcessError)):
            played(size, caught)
        told = [reason.split(".")[0] for reason in sorted(reasons)]
        assert told == ["no memory", *[f"process {size - 1} of {size} failed: no memory"] * (size - 1)]


def test_processes_that_come_apart_end_with_an_error() -> None:
    def work(group: Group) -> None:
        if group.rank:
            group.exchange([], 2)
        group.share(Record())

    with pytest.raises(LostProcessError):
        played(2, work)


@pytest.mark.parametrize("total", [1, 3, 16, 33, 65])
@pytest.mark.parametrize("ways", [2, 3, 8])
def test_every_number_of_parts_gives_the_same_bits(total: int, ways: int) -> None:
    """In one process and in the last of two."""
    numbers = values(total)
    for whole in (shard_of(SOLO, total), shard_of(Processes(None, 1, 2), total)):
        parts = whole.split(ways)
        assert [n for part in parts for n in part.numbers] == list(whole.numbers)
        assert len(parts) <= ways
        assert max(len(p.numbers) for p in parts) - min(len(p.numbers) for p in parts) <= 2 * whole.each
        tallies = []
        for part in parts:
            tallies.append(Tally(part))
            for number in part.numbers:
                tallies[-1].add(number, [numbers[number].copy()])
        tallies[0].join(tallies[1:])
        if whole.group is SOLO:
            assert tallies[0].total([FIRST])[0].tobytes() == summed(1, total).tobytes()


def test_the_numbers_are_such_that_order_matters() -> None:
    numbers = values(16)
    assert np.sum(numbers[::-1], axis=0).tobytes() != summed(1, 16).tobytes()


@pytest.mark.parametrize(("size", "total"), [(1, 5), (2, 16), (3, 100), (5, 3), (64, 64)])
def test_batches_are_dealt_out_once(size: int, total: int) -> None:
    found = [n for s in shards(size, total) if not s.spare for n in s.numbers]
    assert found == list(range(total))


def test_work_is_shared_evenly() -> None:
    assert [len(s.numbers) for s in shards(2, 16)] == [8, 8]
    assert max(len(s.numbers) for s in shards(3, 4 * LEAVES)) == 4 * -(-LEAVES // 3)


def test_few_partial_sums_are_alive() -> None:
    nodes: list[Node] = []
    for leaf in range(LEAVES):
        push(nodes, Node(level=0, index=leaf, arrays=(np.zeros(1),)))
        assert len(nodes) <= LEAVES.bit_length()
    assert [(n.level, n.index) for n in nodes] == [(LEAVES.bit_length() - 1, 0)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("square", [4, 6])
def test_wide_moments_travel_as_triangles_and_come_back_whole(
    monkeypatch: pytest.MonkeyPatch, square: int, dtype: Any
) -> None:
    """Those of several panels in the type of the activations, others in float64."""
    monkeypatch.setattr(triangles, "SQUARE", square)
    rows = np.random.default_rng(0).standard_normal((3, 10, 6)).astype(dtype)
    probe = Probe(value="x", axis=1, index=np.arange(6)[:, None], pooled=False)
    found = Totals(shard_of(SOLO, 3), [probe])
    for number, part in enumerate(rows):
        found.add(number, [[(part, probe, None)]])
    (stats,) = found.stats()
    assert stats is not None
    exact = 1e-5 if dtype == np.float32 else 1e-12
    np.testing.assert_allclose(stats.gram, sum(part.T @ part for part in rows), rtol=exact, atol=exact)
    assert stats.gram.dtype == (dtype if square < 6 else np.float64)
    np.testing.assert_array_equal(stats.gram, stats.gram.T)
    assert stats.count == 30


@pytest.mark.parametrize("total", [1, 5, 33])
def test_few_rows_come_in_the_order_of_the_batches(total: int) -> None:
    """From any number of processes, with the sums of their squares."""
    data = np.random.default_rng(0).standard_normal((total, 3, 6)).astype(np.float32)
    probe = Probe(value="x", axis=1, index=np.arange(6)[:, None], pooled=False, alone=True, few=True)
    for size in (1, 2, 5):

        def work(group: Group) -> tuple[Stats | None, ...]:
            found = Totals(shard_of(group, total), [probe, probe])
            for number in found._shard.numbers:
                found.add(number, [[(data[number], probe, np.array([True, number != 1, True]))]] * 2)
            return found.stats([Owners(range(min(group.size, 4))), Owners(range(group.size - 1, group.size))])

        several = played(size, work) if size > 1 else [work(SOLO)]
        assert [one[0] is not None for one in several] == [rank < 4 for rank in range(size)]
        both = several[0][0], several[-1][1]
        want = data.reshape(-1, 6) if total == 1 else np.delete(data.reshape(-1, 6), 4, axis=0)
        for stats in both:
            assert stats is not None
            np.testing.assert_array_equal(stats.rows, want)
            np.testing.assert_allclose(stats.squares, np.square(want).sum(axis=0), rtol=1e-5)
            assert stats.count == len(want)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_rows_beyond_the_range_of_squares_are_read_in_float64(scale: float) -> None:
    probe = Probe(value="x", axis=1, index=np.arange(6)[:, None], pooled=False, alone=True, few=True)
    found = Totals(shard_of(SOLO, 1), [probe])
    found.add(0, [[(np.full((3, 6), scale, np.float32), probe, None)]])
    (stats,) = found.stats()
    assert stats is not None
    assert stats.rows is not None
    assert stats.rows.dtype == np.float64
    np.testing.assert_allclose(stats.rows.T @ stats.rows, np.full((6, 6), 3 * scale**2), rtol=1e-6)
