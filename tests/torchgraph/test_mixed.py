"""Sequences joined from several: what they are made of, and that held-out ones stay out of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail.methods.refine import distill, laco
from onnxgrail.methods.refine.mixed import PIECES, joined, mixed
from onnxgrail.methods.refine.refinement import Refinement
from onnxgrail.torchgraph import fit as fitting
from tests.tiny import tiny
from tests.torchgraph.test_fit import run_fit

LENGTH, BATCH = 6, 4


def tokens(batches: int = 10) -> dict[str, Any]:
    """Every batch has tokens of its own: ten times its number and up."""
    ids = np.repeat(np.arange(batches) * 10, BATCH)[:, None] + np.arange(LENGTH)
    return {"ids": ids.astype(np.int64)}


def encoder() -> ir.Model:
    """An embedding and one MLP."""
    rng = np.random.default_rng(0)
    shapes = {"t": (100, 8), "w": (8, 16), "v": (16, 8)}
    weights = {n: rng.normal(size=s).astype(np.float32) / 2 for n, s in shapes.items()}
    text = "e = Gather(t, ids)\na = MatMul(e, w)\nb = Relu(a)\nc = MatMul(b, v)\ny = Add(c, e)"
    return tiny("int64[N,6] ids => float[N,6,8] y", text, weights)


def refined(
    monkeypatch: pytest.MonkeyPatch, kind: str, given: dict[str, Any]
) -> tuple[Refinement, Refinement, list[dict[str, Any]]]:
    """The job before and after more samples were made, and the report's rows."""
    seen: list[Refinement] = []

    def spy(job: Refinement, times: int) -> Refinement:
        seen.extend([job, mixed(job, times)])
        return seen[-1]

    for module in (laco, distill):
        monkeypatch.setattr(module, "mixed", spy)
    found = onnxgrail.compress(
        ir.to_proto(encoder()),
        data=given,
        unit_ratio=0.5,
        round_to=1,
        check=False,
        refine=kind,
        batch_size=BATCH,
        held_out=0,
    )
    return seen[0], seen[1], found.report.data["refines"]


def test_a_joined_sequence_has_pieces_of_several_and_each_at_its_place() -> None:
    """A hundred tells the feed, a thousand the row; what is left is the place."""
    rows, length = 8, 64
    place = np.arange(rows)[:, None] * 1000 + np.arange(length)
    mask = np.ones((rows, length), np.int64)
    feeds = [
        {"ids": place + 100 * k, "mask": mask * k, "scale": np.float32(k), "past": np.full((rows, 2, 6, 3), k)}
        for k in range(3)
    ]
    found = joined(feeds, np.random.default_rng(0))
    ids = found["ids"]
    feed, row = ids % 1000 // 100, ids // 1000
    np.testing.assert_array_equal(ids % 100, np.broadcast_to(np.arange(length), ids.shape))
    np.testing.assert_array_equal(found["mask"], feed)
    np.testing.assert_array_equal(ids[:, 0], place[:, 0])  # what has no positions is that of the first feed, too
    assert found["scale"] == 0
    assert not found["past"].any()
    changes = (np.diff(row * 10 + feed, axis=1) != 0).sum(1)
    assert 0 < changes.min() <= changes.max() < max(PIECES)
    assert len({tuple(np.flatnonzero(one)) for one in np.diff(feed, axis=1)}) == rows  # cut at places of their own
    assert set(feed.ravel()) == {0, 1, 2}


@pytest.mark.parametrize("other", [np.zeros((3, 6), np.int64), np.zeros((4, 5), np.int64)])
def test_what_differs_in_shape_is_not_joined(other: Any) -> None:
    one = {"ids": np.ones((4, 6), np.int64)}
    assert joined([one, {"ids": other}], np.random.default_rng(0)) is one


@pytest.mark.parametrize(("kind", "batches"), [("laco", 8 * (1 + laco.MIXED)), ("distill", 32)])
def test_held_out_sequences_stay_out(monkeypatch: pytest.MonkeyPatch, kind: str, batches: int) -> None:
    monkeypatch.setattr(distill, "STEPS", 32)
    monkeypatch.setattr(laco, "STEPS", 16)
    before, after, rows = refined(monkeypatch, kind, tokens())
    assert after.held == before.held == [4, 9]
    assert after.learnt[:8] == before.learnt
    assert len(after.learnt) == batches
    assert after.each == 8
    feeds = [make()["ids"] for make in after.prepared.batches.feeds]
    assert len(feeds) == len(after.masks) == batches + 2
    assert {40, 90}.isdisjoint((np.stack([feeds[k] for k in after.learnt]) // 10 * 10).ravel().tolist())
    assert all(len(set((row // 10).tolist())) > 1 for k in after.learnt[8:] for row in feeds[k])
    again = [make()["ids"] for make in after.prepared.batches.feeds]
    np.testing.assert_array_equal(np.stack(feeds), np.stack(again))
    assert any(r["epochs"] > 0 for r in rows)


def test_padding_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose samples have masks gets masks for what it makes of them."""
    before, _, _ = refined(monkeypatch, "laco", tokens())
    feeds = before.prepared.batches.feeds
    short = np.arange(LENGTH) < 4

    def padded(make: Any) -> Any:
        return lambda: {**make(), "attention_mask": np.broadcast_to(short, (BATCH, LENGTH)).astype(np.int64)}

    batches = dataclasses.replace(before.prepared.batches, feeds=tuple(padded(make) for make in feeds))
    job = dataclasses.replace(before, prepared=dataclasses.replace(before.prepared, batches=batches))
    made = mixed(job, 1)
    assert all(m is not None and (m == short).all() for m in made.masks[10:])


def test_too_few_batches_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, _, _ = refined(monkeypatch, "laco", tokens(2))
    assert mixed(before, 3) is before  # one batch to learn from, one to judge by


def test_images_are_not_joined() -> None:
    one = {"images": np.zeros((4, 1, 8, 8), np.float32)}
    assert joined([one, {"images": np.ones((4, 1, 8, 8), np.float32)}], np.random.default_rng(0)) is one


def test_an_epoch_takes_so_many_batches_and_none_more_often_than_others() -> None:
    order = fitting._shuffled(5, 0)
    first, second = ([next(order) for _ in range(5)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second
    _, found, _ = run_fit(steps=40, epochs=1, each=2)
    assert found.epochs == 20
    assert found.after < found.before


@pytest.mark.parametrize(("late", "epochs"), [(0.0, 5), (0.8, 10)])
def test_luck_at_the_beginning_is_not_chosen(monkeypatch: pytest.MonkeyPatch, late: float, epochs: int) -> None:
    """An improvement in the second of five epochs counts, or leaves smaller steps to be tried."""
    errors = iter([1.0, 1.0, 0.9, *[1.0] * 8])

    def error(self: Any, batches: Any, weights: Any) -> float:
        return next(errors) if weights is self.weights else 1.0  # neither means nor parts of the way are better

    monkeypatch.setattr(fitting._Fitted, "error", error)
    _, found, _ = run_fit(steps=1, epochs=5, late=late)
    assert found.epochs == epochs
    assert bool(found.arrays) == (late == 0)


@pytest.mark.parametrize(("near", "share"), [(False, 1.0), (True, 0.5)])
def test_what_is_near_is_moved_in_smaller_steps(monkeypatch: pytest.MonkeyPatch, near: bool, share: float) -> None:
    rates, begin = [], fitting._Fitted.begin
    monkeypatch.setattr(fitting._Fitted, "begin", lambda self, rate: (rates.append(rate), begin(self, rate))[1])
    monkeypatch.setattr(fitting._Fitted, "error", lambda self, batches, weights: 0.25)
    run_fit(rate=0.1, steps=5, near=near)
    assert rates == pytest.approx([0.0, 0.1 * share, 0.025 * share])
