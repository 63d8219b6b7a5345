"""Sums that do not depend on how many processes take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.moments import triangles
from onnxgrail.calibration.stream.totals import Totals
from onnxgrail.core import Probe
from onnxgrail.machine.group.sums import LEAVES, SOLO, Node, Shard, Tally, push, shard_of
from onnxgrail.machine.steps.codec import Record


class Member:
    """One of several processes that are played one after the other, the first one last."""

    def __init__(self, rank: int, size: int, sent: list[list[Node]]) -> None:
        self.rank, self.size, self._sent = rank, size, sent

    def collect(self, nodes: list[Node]) -> None:
        if self.rank:
            self._sent.insert(0, list(nodes))
            return
        for node in (n for some in self._sent for n in some):
            push(nodes, node)

    def share(self, record: Record | None) -> Record | None:
        return record


def shards(size: int, total: int) -> Iterator[Shard]:
    """Of all processes, the first one last."""
    sent: list[list[Node]] = []
    for rank in reversed(range(size)):
        yield shard_of(Member(rank, size, sent), total)


def values(total: int) -> list[np.ndarray]:
    """Numbers whose sum depends on the order in which they are added."""
    rng = np.random.default_rng(total)
    return [rng.standard_normal(5) * 10.0 ** rng.integers(-8, 8, 5) for _ in range(total)]


def summed(size: int, total: int) -> np.ndarray:
    numbers = values(total)
    for shard in shards(size, total):
        tally = Tally(shard)
        for number in shard.numbers:
            tally.add(number, [numbers[number].copy()])
        found = tally.total()
    return found[0]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 16, 31, 32, 33, 65, 100])
def test_every_number_of_processes_gives_the_same_bits(total: int) -> None:
    alone = summed(1, total)
    np.testing.assert_allclose(alone, np.sum(values(total), axis=0), rtol=1e-9, atol=1e-6)
    for size in (2, 3, 4, 5, 8, 40):
        assert summed(size, total).tobytes() == alone.tobytes(), size


@pytest.mark.parametrize("total", [1, 3, 16, 33, 65])
@pytest.mark.parametrize("ways", [2, 3, 8])
def test_every_number_of_parts_gives_the_same_bits(total: int, ways: int) -> None:
    """In one process and in the last of two."""
    numbers = values(total)
    for whole in (shard_of(SOLO, total), next(shards(2, total))):
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
            assert tallies[0].total()[0].tobytes() == summed(1, total).tobytes()


def test_the_numbers_are_such_that_order_matters() -> None:
    numbers = values(16)
    assert np.sum(numbers[::-1], axis=0).tobytes() != summed(1, 16).tobytes()


@pytest.mark.parametrize(("size", "total"), [(1, 5), (2, 16), (3, 100), (5, 3), (64, 64)])
def test_batches_are_dealt_out_once(size: int, total: int) -> None:
    found = [n for s in reversed(list(shards(size, total))) if not s.spare for n in s.numbers]
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
        for shard in shards(size, total):
            found = Totals(shard, [probe, probe])
            for number in shard.numbers:
                found.add(number, [[(data[number], probe, np.array([True, number != 1, True]))]] * 2)
            both = found.stats()
        want = data.reshape(-1, 6) if total == 1 else np.delete(data.reshape(-1, 6), 4, axis=0)
        for stats in both:
            np.testing.assert_array_equal(stats.rows, want)
            np.testing.assert_allclose(stats.squares, np.square(want).sum(axis=0), rtol=1e-5)
            assert stats.count == len(want)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_rows_beyond_the_range_of_squares_are_read_in_float64(scale: float) -> None:
    probe = Probe(value="x", axis=1, index=np.arange(6)[:, None], pooled=False, alone=True, few=True)
    found = Totals(shard_of(SOLO, 1), [probe])
    found.add(0, [[(np.full((3, 6), scale, np.float32), probe, None)]])
    (stats,) = found.stats()
    assert stats.rows is not None
    assert stats.rows.dtype == np.float64
    np.testing.assert_allclose(stats.rows.T @ stats.rows, np.full((6, 6), 3 * scale**2), rtol=1e-6)
