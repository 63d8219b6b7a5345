"""Detections of two models, listed by score: the same things are compared with each other."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.core import Array
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.kinds.part import Part, things
from onnxgrail.fidelity.lists import Lists
from onnxgrail.fidelity.lists.ranked import aligned, scores_alone
from onnxgrail.fidelity.tally import Tally

COUNT = 12
SCORES = Part(kind="scores", why="scores", form="probabilities")
FORMS = ("apart", "together", "centers", "points")


def detections(form: str) -> dict[str, Array]:
    """Things at places of their own, the best first: four classes, scores from 0.9 down to nearly 0."""
    rng = np.random.default_rng(2)
    score = np.linspace(0.9, 0.01, COUNT, dtype=np.float32)[None].repeat(2, 0)
    label = rng.integers(0, 4, (2, COUNT))
    corner = np.stack([rng.permuted(np.arange(COUNT) * 40.0) for _ in range(4)]).reshape(2, 2, COUNT).transpose(0, 2, 1)
    place = corner if form == "points" else np.concatenate([corner, corner + 30], axis=2)
    if form == "centers":
        place = np.concatenate([corner + 1, np.full_like(corner, 30)], axis=2)
        place[0, 0, 0] = 99  # not left of its right side
    place = place.astype(np.float32)
    if form == "together":
        return {"y": np.concatenate([place, score[..., None], label[..., None]], axis=2).astype(np.float32)}
    return {"place": place, "score": score, "label": label}


def reordered(outputs: dict[str, Array], order: Array) -> dict[str, Array]:
    return {name: array[:, order].copy() for name, array in outputs.items()}


def score_of(outputs: dict[str, Array]) -> Array:
    return outputs["y"][..., 4] if "y" in outputs else outputs["score"]


def label_of(outputs: dict[str, Array]) -> Array:
    return outputs["y"][..., 5] if "y" in outputs else outputs["label"]


def same(one: dict[str, Array], two: dict[str, Array]) -> None:
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])


@pytest.mark.parametrize("form", FORMS)
def test_other_rows_are_the_same_things(form: str) -> None:
    wanted = detections(form)
    same(aligned(wanted, wanted), wanted)
    got = reordered(wanted, np.array([1, 0, 4, 2, 3, *range(5, COUNT)]))
    found = aligned(wanted, got)
    same(found, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_lost_and_what_is_wrong_shows_in_the_scores(form: str) -> None:
    wanted = detections(form)
    got = {name: array.copy() for name, array in wanted.items()}
    label_of(got)[:, 1] += 1  # this thing is lost, and another one is found
    found = aligned(wanted, got)
    expected = score_of(wanted).copy()
    expected[:, 1] = score_of(wanted)[:, -1]
    expected[:, -1] = score_of(wanted)[:, 1]
    np.testing.assert_array_equal(score_of(found), expected)
    np.testing.assert_array_equal(label_of(found), label_of(wanted))


def test_a_short_list_without_room_for_wrong_detections_loses_the_missed_ones() -> None:
    wanted = {name: array[:, :3] for name, array in detections("apart").items()}
    got = {name: array.copy() for name, array in wanted.items()}
    got["place"] += 1000
    assert not aligned(wanted, got)["score"].any()


@pytest.mark.parametrize("far", [0, 12, 25])
def test_boxes_match_if_they_overlap_by_half(far: int) -> None:
    wanted = detections("apart")
    got = wanted | {"place": wanted["place"] + np.array([far, 0, far, 0], np.float32)}
    found = aligned(wanted, got)
    overlap = (30 - far) / (30 + far)
    matched = np.array_equal(found["place"][:, :8], got["place"][:, :8])
    assert matched == (overlap >= 0.5 or far == 0)


def test_other_outputs_stay_as_they_are() -> None:
    wanted = detections("apart")
    wanted["score"] = wanted["score"][:, ::-1]  # not in order
    got = reordered(wanted, np.arange(COUNT)[::-1])
    same(aligned(wanted, got), got)
    alone = {"score": detections("apart")["score"]}
    got = reordered(alone, np.arange(COUNT)[::-1])
    same(aligned(alone, got), got)


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    wanted = detections("apart")
    got = wanted | {"place": wanted["place"] * np.float32(np.nan)}
    assert np.isnan(aligned(wanted, got)["place"]).all()


def test_numbers_beside_a_class_go_with_the_row() -> None:
    wanted = detections("together")
    more = np.random.default_rng(5).normal(size=(2, COUNT, 3)).astype(np.float32)
    wanted = {"y": np.concatenate([wanted["y"], more], axis=2)}
    got = reordered(wanted, np.array([1, 0, *range(2, COUNT)]))
    got["y"][..., -1] += 0.01
    found = aligned(wanted, got)["y"]
    np.testing.assert_array_equal(found[..., :-1], wanted["y"][..., :-1])
    np.testing.assert_allclose(found[:, :10, -1], wanted["y"][:, :10, -1] + 0.01, rtol=1e-5)


def test_lists_of_a_single_sample_match_in_any_order() -> None:
    """As after non-maximum suppression, which lists one class after another."""
    wanted = {name: array[0] for name, array in reordered(detections("apart"), np.arange(COUNT)[::-1]).items()}
    got = {name: array[np.array([*range(1, COUNT), 0])] for name, array in wanted.items()}
    same(aligned(wanted, got), got)
    found = aligned(wanted, got, wanted.keys())
    for name, array in found.items():
        np.testing.assert_array_equal(array[2:], wanted[name][2:])  # the others have low scores


ORDERS = {
    "YOLO": (0, 1, 2, 3, 4, 5),
    "YOLO with points": (0, 1, 2, 3, 4, 5, 6, 7),
    "PaddleDetection": (5, 4, 0, 1, 2, 3),
    "SSD": (6, 5, 4, 0, 1, 2, 3),
    "YOLOv7": (6, 0, 1, 2, 3, 5, 4),
}


def rows_of(name: str, count: int, *, relative: bool = False, seed: int = 0) -> Array:
    """Rows of detections: corners, score, class, and zeros, in the order of a tool."""
    rng = np.random.default_rng(seed)
    corner = 40.0 * np.stack([rng.permutation(count), rng.permutation(count)], axis=1)
    columns = np.zeros((count, 8), np.float32)
    columns[:, :4] = np.concatenate([corner, corner + 30], axis=1) / (40 * count if relative else 1)
    columns[:, 4], columns[:, 5] = rng.uniform(0.3, 0.9, count), rng.integers(0, 4, count)
    return columns[:, list(ORDERS[name])]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_columns_of_detections_are_found(name: str, relative: bool) -> None:
    rows = rows_of(name, 9, relative=relative)
    np.testing.assert_array_equal(
        rows[:, things(rows)], rows_of("YOLO with points", 9, relative=relative)[:, : rows.shape[1]]
    )


def test_other_rows_are_no_detections() -> None:
    rng = np.random.default_rng(1)
    chances = rng.random((20, 7))
    for rows in (
        chances / chances.sum(axis=1, keepdims=True),  # distributions
        rng.standard_normal((20, 8)),
        np.zeros((3, 6)),
        np.zeros((0, 6)),
        rows_of("YOLO", 9)[:, :5],
        rows_of("YOLO", 9)[:, [2, 3, 0, 1, 4, 5]],
        rows_of("YOLO", 9).astype(np.int64),
    ):
        assert things(rows) == ()


@pytest.mark.parametrize("name", ORDERS)
def test_one_list_of_a_single_sample_matches_in_any_order(name: str) -> None:
    wanted = {"y": rows_of(name, COUNT)}
    got = {"y": wanted["y"][np.array([*range(1, COUNT), 0])]}
    same(aligned(wanted, got), got)
    same(aligned(wanted, got, {"y"}), wanted)
    place = ORDERS[name].index(5)
    wrong = {"y": wanted["y"] + 4 * (np.arange(wanted["y"].shape[1]) == place).astype(np.float32)}
    score = aligned(wanted, wrong, {"y"})["y"][:, ORDERS[name].index(4)]
    assert not score.any()  # all are lost


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("change", ["none", "score", "class", "order", "length"])
def test_lists_are_judged_by_scores_and_by_what_is_beside_them(name: str, change: str) -> None:
    """Of many samples, with different numbers of detections: one, none, several."""
    tally, lists = Tally(Clues()), Lists({"y": (0,)}, set())
    tally.clues = Clues(lists=lists.names)
    for seed in range(80):
        one = two = rows_of(name, (3, 1, 0, 5)[seed % 4], seed=seed)
        scores, classes = (ORDERS[name].index(column) for column in (4, 5))
        two = two[::-1].copy() if change == "order" else two[1:].copy() if change == "length" else two.copy()
        two[:, scores] *= 0.4 if change == "score" else 1
        two[:, classes] += change == "class"
        sides = lists.leveled({"x": np.zeros(3)}, {"y": one}, {"y": two})
        tally.add(sides[0], aligned(*sides, lists.growing), single=True)
    (found,) = tally.results()
    assert {verdict.kind for verdict in found.verdicts} == {"scores", "values"}
    losses = {verdict.kind: verdict.loss or 0.0 for verdict in found.verdicts}
    assert (losses["scores"] > 0.2) == (change in ("score", "class", "length"))
    assert losses["values"] == 0 or change in ("class", "length")


@pytest.mark.parametrize("change", ["none", "score", "class", "order", "length"])
def test_scores_and_boxes_of_lists_in_outputs_of_their_own(change: str) -> None:
    """Boxes count where a score is read, also of a sample with one detection."""

    def apart(rows: Array) -> dict[str, Array]:
        return {"boxes": rows[:, :4], "scores": rows[:, 4], "classes": rows[:, 5].astype(np.int64)}

    tally, lists = Tally(Clues()), Lists(dict.fromkeys(("boxes", "scores", "classes"), (0,)), set())
    tally.clues = Clues(lists=lists.names)
    for seed in range(80):
        one = two = rows_of("YOLO", (3, 1, 0, 5)[seed % 4], seed=seed)
        two = two[::-1].copy() if change == "order" else two[1:].copy() if change == "length" else two.copy()
        two[:, 4] *= 0.4 if change == "score" else 1
        two[:, 5] += change == "class"
        sides = lists.leveled({"x": np.zeros(3)}, apart(one), apart(two))
        tally.clues.detected.update(scores_alone(sides[0], lists.growing))
        tally.add(sides[0], aligned(*sides, lists.growing), single=True)
    found = {one.name: one.verdicts[0] for one in tally.results()}
    assert [found[name].kind for name in ("boxes", "scores", "classes")] == ["values", "scores", "labels"]
    assert found["boxes"].measure == "NMSE where a score is above 0.1"
    lost = change in ("score", "class", "length")
    assert ((found["scores"].loss or 0.0) > 0.2) == lost
    assert not found["boxes"].loss or lost


def test_a_mask_of_scores_in_some_batches_only_is_no_error() -> None:
    tally = Tally(Clues(), known={"y": (Part(kind="values", why="numbers", axis=2),), "s": (SCORES,)})
    for count in (3, 4):  # the scores have as many positions as the others in the second batch only
        one = {"y": np.ones((2, count, 4)), "s": np.full((2, 4), 0.5)}
        tally.add(one, {"y": 0.9 * one["y"], "s": one["s"]})
    (found,) = (one.verdicts for one in tally.results() if one.name == "y")
    assert [verdict.measure for verdict in found] == ["NMSE"]
    assert found[0].value == pytest.approx(0.01)
