"""Trials and notes look at the samples in which a model finds something."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.allocation.found import Judged, judged_of
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import chosen, spread
from onnxgrail.calibration.judge import Judge
from onnxgrail.calibration.prepare import prepare
from onnxgrail.core import Feed, Floats, Labels
from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.clues import Clues, clues_of
from onnxgrail.fidelity.goals import Goals
from onnxgrail.fidelity.kinds import parts_of
from onnxgrail.fidelity.loss import losses_of
from onnxgrail.machine.job import Job
from onnxgrail.options import Recipe
from tests.tiny import tiny

RNG = np.random.default_rng(0)


def batches(count: int) -> Batches:
    def feed(number: int) -> Feed:
        return {"x": np.full(1, number)}

    return Batches(feeds=tuple(lambda n=n: feed(n) for n in range(count)), samples=count, source="data")  # type: ignore[misc]


@given(st.integers(1, 40), st.integers(1, 40))
def test_feeds_with_as_much_in_them_are_spread(count: int, wanted: int) -> None:
    wanted, feeds = min(count, wanted), batches(count)
    assert [make()["x"] for make in chosen(feeds, np.full(count, 3.0), wanted)] == [
        make()["x"] for make in spread(feeds, wanted)
    ]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(1, 40))
def test_so_many_feeds_are_chosen_in_order(content: list[float], wanted: int) -> None:
    wanted, feeds = min(len(content), wanted), batches(len(content))
    numbers = [int(feed()["x"][0]) for feed in chosen(feeds, np.array(content), wanted)]
    assert len(numbers) == wanted
    assert numbers == sorted(set(numbers))


def test_rare_content_is_chosen() -> None:
    content = np.zeros(64)
    content[[3, 50]] = 5.0
    numbers = [int(feed()["x"][0]) for feed in chosen(batches(64), content, 8)]
    assert {3, 50} < set(numbers)


def test_content_is_the_sum_of_scores() -> None:
    """Half of the samples have scores at a tenth of the positions, the others none."""
    size = 200
    logits = np.full((24, size), -9.0, np.float32)
    logits[::2, :20] = RNG.uniform(1, 3, (12, 20))
    model = tiny(f"float[N,{size}] x => float[N,{size}] y", "y0 = Mul(x, one)\ny = Sigmoid(y0)", {"one": (size,)})
    model.graph.initializers["one"].const_value = ir.tensor(np.ones(size, np.float32))
    prepared = prepare(model, {"x": logits}, Job(recipe=Recipe(batch_size=1)), held_out=0)
    with Judge(prepared.model, prepared.batches, Recipe().providers) as judge:
        content = judge.content()
    assert content.shape == (24,)
    assert (content[::2] > 0).all()
    assert not content[1::2].any()


def apart(rows: Floats) -> Floats:
    """Rows without what their columns have in common, as class scores are learned."""
    return np.asarray(rows - rows.mean(axis=1, keepdims=True))


def test_outputs_without_scores_have_as_much_in_all_samples() -> None:
    model = tiny("float[N,8] x => float[N,8] y", "y = MatMul(x, w)", {"w": (8, 8)})
    data = {"x": RNG.standard_normal((48, 8)).astype(np.float32)}
    prepared = prepare(model, data, Job(recipe=Recipe(batch_size=8)), held_out=0)
    with Judge(prepared.model, prepared.batches, Recipe().providers) as judge:
        np.testing.assert_array_equal(judge.content(), np.ones(6))


def test_bare_samples_are_counted_and_named() -> None:
    scores = np.zeros((30, 100), np.float32)
    scores[:4, :30] = RNG.uniform(0.5, 1, (4, 30))
    tally = Tally()
    tally.add({"y": scores}, {"y": scores * 0.9})
    (loss,) = losses_of(tally)
    assert (loss.kind, loss.bare) == ("scores", 26)

    def judged(bare: int) -> Judged:
        return Judged(
            output="y", part="", name="n", kind="scores", samples=30, mean=0, bound=0, agreement={}, bare=bare
        )

    assert judged(26).scarce == "26 of 30 samples have nothing in them that the loss compares"
    assert not judged(15).scarce


@pytest.mark.parametrize(("others", "says"), [(0, "all 30 samples are of one class"), (1, "")])
def test_samples_of_one_class_are_named(others: int, says: str) -> None:
    chances = np.full((30, 1), 0.02, np.float32)
    chances[:others] = 0.9
    tally = Tally()
    tally.add({"y": chances}, {"y": chances * 0.9})
    assert losses_of(tally)[0].kind == "classes"
    assert judged_of(losses_of(tally)[0]).scarce == says


def test_empty_positions_of_a_weak_detector_do_not_count() -> None:
    scores = 0.15 + 0.01 * RNG.standard_normal((30, 500, 1))
    scores[:, :6] = 0.9
    fewer = scores.copy()
    fewer[:, :2] = 0.15
    tally = Tally()
    tally.add({"scores": scores}, {"scores": fewer})
    (loss,) = losses_of(tally)
    assert loss.mean > 0.2  # a third of what is found
    assert loss.name == "difference of scores above 0.26, as a share of the higher ones"


def test_scores_in_between_count_from_one_tenth_on() -> None:
    spread = RNG.uniform(0, 0.45, (30, 500, 1))
    spread[:, :6] = 0.9
    tally = Tally()
    tally.add({"scores": spread}, {"scores": spread * 0.9})
    (loss,) = losses_of(tally)
    assert loss.name == "difference of scores above 0.1, as a share of the higher ones"


@pytest.mark.parametrize(("near", "kind"), [(0.3, "values"), (3.0, "classes")])
def test_what_resembles_an_input_is_no_score(near: float, kind: str) -> None:
    rows = apart(RNG.standard_normal((30, 12)) * 3)
    made = apart(rows + near * 3 * RNG.standard_normal((30, 12)))
    clues = clues_of({"x": rows}, {"y": made}, scores=None, known=True, synthetic=False)
    assert [part.kind for part in parts_of("y", [made], clues)] == [kind]


@pytest.mark.parametrize(
    ("name", "middle", "columns", "kind"), [("y", 0.5, 3, "scores"), ("logits", 0.0, 5, "classes")]
)
def test_labels_and_classes_near_each_other_are_numbers_too(name: str, middle: float, columns: int, kind: str) -> None:
    rows = middle + apart(0.03 * RNG.standard_normal((30, columns)))
    assert [part.kind for part in parts_of(name, [rows], Clues())] == [kind, "values"]


@pytest.mark.parametrize(("name", "kinds"), [("actions", ("values", "classes")), ("action_logits", ("classes",))])
def test_actions_may_be_movements_or_choices(name: str, kinds: tuple[str, ...]) -> None:
    rows = apart(RNG.standard_normal((30, 12)) * 3)
    assert tuple(part.kind for part in parts_of(name, [rows], Clues())) == kinds


@pytest.mark.parametrize(
    ("name", "columns", "kinds"),
    [("params", 6, ("values",)), ("logits", 6, ("classes", "scores")), ("y", 12, ("values", "classes"))],
)
@pytest.mark.parametrize("common", [1.0, 9.0])
def test_columns_that_vary_on_their_own_are_numbers_or_labels(
    name: str, columns: int, kinds: tuple[str, ...], common: float
) -> None:
    rows = 3 * RNG.standard_normal((30, columns)) + common * RNG.standard_normal((30, 1))
    found = [part for part in parts_of(name, [rows], Clues()) if not part.relative]
    assert tuple(part.kind for part in found) == kinds
    tally = Tally()
    tally.add({name: rows}, {name: rows + 5})  # a softmax does not see it
    assert max(loss.mean for loss in losses_of(tally)) > 0.05


@pytest.mark.parametrize("name", ["pose", "y"])
def test_a_few_numbers_count_by_their_own_spread(name: str) -> None:
    rows = np.array([300.0, 200.0, 0.3]) * RNG.standard_normal((30, 3))  # millimetres and an angle
    tally = Tally()
    tally.add({name: rows}, {name: rows * [1, 1, 0]})
    (loss,) = [loss for loss in losses_of(tally) if loss.kind == "values"]
    assert loss.mean > 0.1
    (result,) = tally.results()
    (verdict,) = [verdict for verdict in result.verdicts if verdict.kind == "values"]
    assert (verdict.details["channel"], verdict.details["worst_channel"] > 0.9) == (2, True)


def test_labels_are_those_of_scores() -> None:
    scores, vectors = 9 * np.eye(4)[RNG.integers(4, size=30)], RNG.standard_normal((30, 64))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    goals = Goals(labels=Labels(values=scores.argmax(axis=1)))
    for feed, judged in (({"scores": scores, "key": vectors}, [30, 0]), ({"key": vectors}, [30])):
        tally = Tally()
        tally.add(feed, feed, goals=goals)
        assert [result.judged for result in tally.results()] == judged


@pytest.mark.parametrize(("name", "raw"), [("ctr", False), ("logits", True)])
def test_labels_of_an_event_judge_its_chance(name: str, raw: bool) -> None:
    truth = RNG.integers(2, size=40)
    right = np.where(truth, 2.0, -1.0)
    wrong = np.where(np.arange(40) < 10, -right, right)
    sides = [{name: side[:, None] if raw else 1 / (1 + np.exp(-side))[:, None]} for side in (right, wrong)]
    tally = Tally()
    tally.add(*sides, goals=Goals(labels=Labels(values=truth)))
    (result,) = tally.results()
    assert (result.judged, result.top1_reference, result.top1) == (40, 1.0, 0.75)


def test_a_field_of_displacements_is_no_map_of_classes() -> None:
    field = 12 * RNG.standard_normal((30, 2, 8, 8))
    assert [part.kind for part in parts_of("out", [field], Clues())] == ["values"]
    parted = field - field.mean(axis=1, keepdims=True)
    assert [part.kind for part in parts_of("out", [parted], Clues())] == ["scores"]


@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 3), (24, 7)])
@pytest.mark.parametrize("name", ["prediction", "predictions", "prediction_outputs"])
def test_a_prediction_may_be_any_number(name: str, shape: tuple[int, ...]) -> None:
    pressure = 1013 + 8 * RNG.standard_normal((60, *shape))
    tally = Tally()
    tally.add({name: pressure}, {name: 1013 + 0.7 * (pressure - 1013)})
    (loss,) = losses_of(tally)
    assert loss.kind == "values"
    assert loss.mean > 0.02


def test_embeddings_near_each_other_count_by_what_differs() -> None:
    """All cosines are high, also between different samples."""
    rows = RNG.standard_normal((60, 64)) + 2
    for name, array in (("embedding", rows), ("y", rows / np.linalg.norm(rows, axis=1, keepdims=True))):
        (part,) = parts_of(name, [array], Clues())
        assert (part.kind, part.center is None) == ("values", False)
    assert [part.kind for part in parts_of("embedding", [rows - 2], Clues())] == ["embedding"]


def test_grades_that_are_named_as_scores_are_numbers_too() -> None:
    grades = np.clip(2.5 + 1.3 * RNG.standard_normal((200, 1)), -0.05, 5)
    assert [part.kind for part in parts_of("logits", [grades], Clues())] == ["classes", "values"]
    both = np.concatenate([grades, grades[::-1]], axis=1)
    assert [part.kind for part in parts_of("logits", [both], Clues())] == ["classes", "scores", "values"]
    assert [part.kind for part in parts_of("logits", [grades - 99], Clues())] == ["values"]  # no logit is so large


def test_rare_events_are_numbers_too() -> None:
    frauds = 0.0015 * RNG.exponential(size=(200, 1)) ** 2
    assert [part.kind for part in parts_of("probability", [frauds], Clues())] == ["classes", "values"]
    hazards = np.linspace(0.01, 0.06, 12) * (1 + 0.2 * RNG.standard_normal((200, 1)))
    assert [part.kind for part in parts_of("hazard", [hazards], Clues())] == ["scores", "values"]


def test_a_few_samples_may_hold_most_of_the_energy() -> None:
    revenue = np.exp(2 * RNG.standard_normal((400, 1)))
    tally = Tally()
    tally.add({"y": revenue}, {"y": np.minimum(revenue, 30)})
    (loss,) = losses_of(tally)
    (result,) = tally.results()
    assert loss.mean > 0.4 * result.verdicts[0].value > 0.05


def test_without_anything_to_compare_nothing_is_known() -> None:
    tally = Tally()
    tally.add({"scores": np.full((30, 400), 1e-5)}, {"scores": np.full((30, 400), 2e-5)})
    (loss,) = losses_of(tally)
    assert (loss.mean, loss.bound, loss.bare) == (1.0, 1.0, 30)


@pytest.mark.parametrize("mask", [-1e4, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("columns", [6, 64])
def test_masked_scores_are_those_of_classes(columns: int, mask: float) -> None:
    scores = apart(RNG.standard_normal((60, columns)))
    legal = RNG.random((60, columns)) < 0.7
    masked = np.where(legal | (scores > 1), scores, mask)
    assert parts_of("policy", [masked], Clues())[0].kind == "classes"
    energies = -97_200 + 4.7 * RNG.standard_normal((60, 1))
    (part,) = parts_of("output", [energies], Clues())
    assert (part.kind, part.center is None) == ("values", False)


def test_values_of_actions_are_judged_by_what_tells_them_apart() -> None:
    advantages = 0.1 * RNG.standard_normal((200, 4))
    values = 5 * RNG.standard_normal((200, 1)) + advantages
    tally = Tally()
    tally.add({"q": values}, {"q": values - advantages})
    assert losses_of(tally)[0].mean > 0.3


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 4), (16, 7), (40,)])
def test_channels_of_other_units_count_by_their_own_spread(shape: tuple[int, ...]) -> None:
    units = np.ones(shape)
    units[: len(units) // 3] = 1000  # pressures beside velocities
    field = units * RNG.standard_normal((60, *shape))
    tally = Tally()
    tally.add({"y": field}, {"y": np.where(units > 1, field, 0)})
    assert losses_of(tally)[0].mean > 0.1


def test_a_field_in_a_row_is_no_embedding() -> None:
    field = np.cumsum(RNG.standard_normal((60, 64)), axis=1)
    for rows in (field, np.exp(field / 8)):
        tally = Tally()
        tally.add({"y": rows}, {"y": 0.7 * rows})
        assert losses_of(tally)[0].mean > 0.03


@pytest.mark.parametrize(
    ("name", "kind"), [("force_vector", "values"), ("pooled_logits", "classes"), ("distillation_logits", "classes")]
)
def test_names_of_scores_and_of_a_few_numbers_are_no_features(name: str, kind: str) -> None:
    rows = apart(3 * RNG.standard_normal((60, 3 if kind == "values" else 20)))
    rows = rows if kind == "classes" else RNG.standard_normal((60, 3))
    assert parts_of(name, [rows], Clues())[0].kind == kind


def test_the_next_state_of_a_world_counts() -> None:
    feed = {"state": RNG.standard_normal((60, 12)), "action": RNG.standard_normal((60, 3))}
    outputs = {"next_state": RNG.standard_normal((60, 12)), "reward": RNG.standard_normal((60, 1))}
    clues = clues_of(feed, outputs, scores=None, known=True, synthetic=False)
    assert not clues.is_state("next_state", (60, 12))
    assert clues_of({"state": feed["state"]}, outputs, scores=None, known=True, synthetic=False).is_state(
        "next_state", (60, 12)
    )


def test_events_that_hardly_ever_fail_are_numbers_too() -> None:
    sure = 1 - 0.004 * RNG.exponential(size=(200, 1))
    assert [part.kind for part in parts_of("y", [sure], Clues())] == ["classes", "values"]
    survival = np.exp(-np.cumsum(0.002 * RNG.exponential(size=(200, 24)), axis=1))
    assert [part.kind for part in parts_of("y", [survival], Clues())] == ["scores", "values"]


def test_sizes_beside_a_heat_map_count_at_its_peaks() -> None:
    """As of a detector that finds centers (CenterNet): elsewhere, a size means nothing."""
    heat = 0.02 * RNG.random((40, 2, 12, 12))
    rows, columns = RNG.integers(12, size=(2, 40))
    heat[np.arange(40), 0, rows, columns] = 0.95
    sizes = 3 + RNG.standard_normal((40, 2, 12, 12))
    wrong = sizes.copy()
    wrong[np.arange(40), :, rows, columns] *= 2
    tally = Tally()
    tally.add({"hm": heat, "wh": sizes}, {"hm": heat, "wh": wrong})
    loss = losses_of(tally)[0]
    assert (loss.output, loss.mean > 0.9) == ("wh", True)
    tally = Tally()
    wrong = np.where(heat.max(axis=1, keepdims=True) > 0.1, sizes, 2 * sizes)
    tally.add({"hm": heat, "wh": sizes}, {"hm": heat, "wh": wrong})
    assert losses_of(tally)[0].mean < 0.01
