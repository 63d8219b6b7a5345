"""Losses per sample of every kind of output, and which output decides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.judge import Judge
from onnxgrail.core import Array
from onnxgrail.fidelity import Clues, Tally
from onnxgrail.fidelity import tally as tallies
from onnxgrail.fidelity.kinds import parts_of
from onnxgrail.fidelity.loss import Agreement, Loss, losses_of, worst_loss
from onnxgrail.fidelity.measures import MEASURES
from onnxgrail.fidelity.measures.values import BOXES
from onnxgrail.graph.io.serial import to_bytes
from tests.reading import read
from tests.tiny import ints, tiny

N = 24
WEIGHTS = {"w": (6, 5), "v": (6, 120), "sizes": ints(40, 3)}
NO_AXIS = """
    y = MatMul(x, w)
    flat = MatMul(x, v)
    boxes = Reshape(flat, sizes)
"""


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def softmax(values: Array) -> Array:
    shifted = np.exp(values - values.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def tally(a: dict[str, Array], b: dict[str, Array], *, clues: Clues | None = None, **options: Any) -> Tally:
    together = Tally(clues)
    for start in range(0, N, 7):
        cut = slice(start, start + 7)
        sides: Any = ({name: array[cut] for name, array in side.items()} for side in (a, b))
        together.add(*sides, **options)
    return together


def loss(name: str, a: Array, b: Array, **options: Any) -> Loss:
    only = worst_loss(tally({name: a}, {name: b}, **options))
    assert only is not None
    return only


def test_classes_are_judged_by_total_variation() -> None:
    a, b = softmax(rng().normal(size=(N, 5))), softmax(np.random.default_rng(8).normal(size=(N, 5)))
    seen = loss("y", a, b)
    assert (seen.kind, seen.name) == ("classes", "total variation")
    np.testing.assert_allclose(seen.values, np.minimum(MEASURES["classes"].scale * 0.5 * np.abs(a - b).sum(axis=1), 1))
    assert seen.mean == pytest.approx(seen.values.mean())
    assert seen.mean < seen.bound <= 1
    assert seen.agreement.value == pytest.approx(np.mean(a.argmax(axis=1) == b.argmax(axis=1)))
    assert seen.agreement.counted
    assert seen.agreement.samples == N


def test_scores_are_judged_by_their_overlap_and_empty_samples_lose_nothing() -> None:
    a = np.zeros((N, 40))
    a[: N // 2, 3] = 0.9
    b = a.copy()
    b[: N // 2, 3] = 0.891
    seen = loss("scores", a, b)
    assert seen.kind == "scores"
    np.testing.assert_allclose(seen.values, np.where(np.arange(N) < N // 2, MEASURES["scores"].scale * 0.01, 0))


def test_samples_with_few_scores_count_less() -> None:
    a = np.zeros((N, 40))
    a[1:, :10] = 0.9
    a[0, 0] = 0.9
    b = a.copy()
    b[0, 0] = 0.0
    assert loss("scores", a, b).values[0] == pytest.approx(MEASURES["scores"].scale * 0.9 / a.sum(axis=1).mean())


def test_scores_that_only_one_model_has_count() -> None:
    a = np.zeros((N, 40))
    a[: N // 2, 3] = 0.9
    b = a.copy()
    b[-1, 5] = 0.9
    assert loss("scores", a, b).values[-1] == pytest.approx(MEASURES["scores"].scale)


def test_tokens_are_told_as_relative_perplexity() -> None:
    a = rng().normal(size=(N, 6, 61))
    b = a + 0.05 * rng().normal(size=a.shape)
    seen = loss("logits", a, b, clues=Clues(ids=(N, 6), predicts=True))
    p, q = softmax(a), softmax(b)
    far = (p * np.log(p / q)).sum(axis=-1).mean(axis=1)
    np.testing.assert_allclose(seen.values, MEASURES["tokens"].scale * np.expm1(far), rtol=1e-6)
    assert "perplexity" in seen.name
    assert not seen.agreement.counted


def test_values_are_judged_by_nmse_and_embeddings_by_cosine() -> None:
    wave, vector = rng().normal(size=(N, 1, 300)), rng().normal(size=(N, 128))
    b = 0.99 * wave
    np.testing.assert_allclose(loss("wave", wave, b).values, MEASURES["values"].scale * 1e-4, rtol=0.2)
    other = vector + 0.1 * np.random.default_rng(1).normal(size=vector.shape)
    cosines = (vector * other).sum(axis=1) / np.linalg.norm(vector, axis=1) / np.linalg.norm(other, axis=1)
    seen = loss("embedding", vector, other)
    np.testing.assert_allclose(seen.values, MEASURES["embedding"].scale * (1 - cosines))


def test_the_worst_output_decides_and_states_do_not() -> None:
    a = {"y": softmax(rng().normal(size=(N, 5))), "z": rng().normal(size=(N, 1, 300)), "stateN": np.ones((N, 3))}
    b = {"y": a["y"], "z": a["z"] * 0.9, "stateN": -a["stateN"]}
    clues = Clues(fed={"state": (N, 3)})
    assert [one.output for one in losses_of(tally(a, b, clues=clues))] == ["z", "y"]
    only = losses_of(tally({"stateN": a["stateN"]}, {"stateN": b["stateN"]}, clues=clues))
    assert [one.kind for one in only] == ["state"]
    assert worst_loss(Tally()) is None


def faces(*, low: float = 0.0) -> tuple[Array, Array, Array]:
    """Scores of 50 positions of which 0 to 4 are high, boxes, and a mask of the high ones."""
    high = np.zeros((N, 50), bool)
    high[:, :5] = np.arange(N)[:, None] % 5 > np.arange(5)
    scores = np.where(high, 0.9, low)[..., None]
    return scores, rng().normal(size=(N, 50, 4)), high


@pytest.mark.parametrize("swapped", [False, True])
def test_boxes_that_nobody_reads_do_not_count(swapped: bool) -> None:
    scores, boxes, high = faces()
    other = np.where(high[..., None], boxes, 5.0)
    a, b = (np.concatenate([side, scores, scores], axis=2) for side in (boxes, other))
    if swapped:
        a, b = np.moveaxis(a, 1, 2), np.moveaxis(b, 1, 2)
    seen = losses_of(tally({"y": a}, {"y": b}))
    assert [(one.part, one.kind) for one in seen] == [("columns 4 to 5", "scores"), ("columns 0 to 3", "values")]
    assert [one.bound for one in seen] == [0, 0]


def test_boxes_that_are_read_count() -> None:
    scores, boxes, high = faces()
    other = np.where(high[..., None], 1.1 * boxes, boxes)
    seen = losses_of(tally({"boxes": boxes, "scores": scores}, {"boxes": other, "scores": scores}))[0]
    assert seen.output == "boxes"
    np.testing.assert_allclose(seen.values[high.sum(axis=1) > 1], BOXES.scale * 0.01, rtol=0.9)
    np.testing.assert_array_equal(seen.values == 0, ~high.any(axis=1))


def test_a_position_is_read_if_all_scores_are_high_there() -> None:
    scores, boxes, high = faces()
    everywhere = np.full_like(scores, 0.9)
    everywhere[:, ::7] = 0.0
    read = high[..., None] & (everywhere > 0)
    a = {"cls": everywhere, "obj": scores, "bbox": boxes}
    (worst, *_) = losses_of(tally(a, {**a, "bbox": np.where(read, boxes, 5.0)}))
    assert worst.bound == 0
    (worst, *_) = losses_of(tally(a, {**a, "bbox": np.where(read, 5.0, boxes)}))
    assert worst.output == "bbox"


def test_scores_that_are_never_high_judge_only_if_nothing_else_does() -> None:
    scores, boxes, _ = faces()
    faint = 0.01 * rng().random(size=(N, 400, 1))
    a = {"score_8": scores, "box_8": boxes, "score_16": faint, "box_16": rng().normal(size=(N, 400, 4))}
    b = {**a, "score_16": faint[:, ::-1], "box_16": -a["box_16"]}
    assert [one.output for one in losses_of(tally(a, b))] == ["score_8", "box_8"]
    alone = {name: array for name, array in a.items() if "16" in name}
    seen = losses_of(tally(alone, {name: b[name] for name in alone}))
    assert all(one.mean > 0.5 for one in seen)


def test_values_that_are_not_finite() -> None:
    a = softmax(rng().normal(size=(N, 5)))
    b = a.copy()
    b[4, 2] = np.nan
    seen = loss("y", a, b)
    assert seen.values[4] == 1
    assert seen.bound == math.inf


def test_one_sample_proves_nothing() -> None:
    together = Tally()
    together.add({"y": np.array([[0.2, 0.8]])}, {"y": np.array([[0.2, 0.8]])})
    (seen,) = losses_of(together)
    assert (seen.mean, seen.bound) == (0, 1)


def test_outputs_without_a_sample_axis_are_one_sample_of_a_model_that_takes_one() -> None:
    """Rows of one sample are no samples: a bound from them would be far too tight."""
    model = tiny("float[1,6] x => float[1,5] y, float[40,3] boxes", NO_AXIS, WEIGHTS)
    other = tiny("float[1,6] x => float[1,5] y, float[40,3] boxes", NO_AXIS, WEIGHTS, seed=1)
    batches = read({"x": rng().normal(size=(N, 6)).astype(np.float32)}, signature_of(model))
    seen = losses_of(run_both(Pair(to_bytes(model), to_bytes(other)), batches))
    assert {one.output: (one.kind, len(one.values)) for one in seen} == {"y": ("values", N), "boxes": ("values", N)}


def test_the_judge_of_a_search_counts_such_samples_alike() -> None:
    model, other = (tiny("float[1,6] x => float[40,3] boxes", NO_AXIS, WEIGHTS, seed=seed) for seed in (0, 1))
    batches = read({"x": rng().normal(size=(N, 6)).astype(np.float32)}, signature_of(model))
    with Judge(model, batches, ("CPUExecutionProvider",)) as judge:
        assert len(judge.loss((other, range(N))).values) == N


def test_the_content_of_outputs_is_detected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = (tiny("float[N,6] x => float[N,3] y", "y = MatMul(x, w)", {"w": (6, 3)}, seed=n) for n in (0, 1))
    batches = read({"x": rng().normal(size=(N, 6)).astype(np.float32)}, signature_of(model))
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return parts_of(*args)

    with Judge(model, batches, ("CPUExecutionProvider",)) as judge:
        once = judge.loss((other, range(len(batches))))
        monkeypatch.setattr(tallies, "parts_of", counted)
        again = judge.loss((other, range(len(batches))))
        assert not calls
        judge.loss((other, range(len(batches) - 1)))
        assert not calls
    np.testing.assert_array_equal(once.values, again.values)


def test_batches_do_not_matter() -> None:
    a, b = softmax(rng().normal(size=(N, 5))), softmax(np.random.default_rng(8).normal(size=(N, 5)))
    at_once = Tally()
    at_once.add({"y": a}, {"y": b})
    np.testing.assert_array_equal(losses_of(at_once)[0].values, loss("y", a, b).values)


@pytest.mark.parametrize(
    ("value", "interval", "samples", "low", "high"),
    [
        (1.0, (0.926, 1.0), 48, 150, 250),  # no error in 48
        (0.90, (0.78, 0.96), 40, 40, 40),  # settled
        (0.97, (0.93, 0.99), 100, 100, 1000),
    ],
)
def test_how_many_samples_settle_it(
    value: float, interval: tuple[float, float], samples: int, low: int, high: int
) -> None:
    seen = Agreement(measure="top-1", value=value, interval=interval, higher=True, samples=samples, counted=True)
    needed = seen.settled_by()
    assert needed is not None
    assert low <= needed <= high


@pytest.mark.parametrize("swapped", [False, True])
def test_classes_count_where_something_is_found(swapped: bool) -> None:
    """Decoders multiply scores of classes by objectness: what changes elsewhere is not read."""
    found, boxes, high = faces(low=0.01)
    classes = np.full((N, 50, 3), 0.4) + 0.5 * np.eye(3)[0]
    other = np.where(high[..., None], classes, classes[..., ::-1])
    a, b = (np.concatenate([boxes, found, side], axis=2) for side in (classes, other))
    if swapped:
        a, b = np.moveaxis(a, 1, 2), np.moveaxis(b, 1, 2)
    scores = losses_of(tally({"y": a}, {"y": b}))[0]
    assert (scores.part, scores.bound) == ("columns 4 to 7", 0)
    worse = np.where(high[..., None], classes[..., ::-1], classes)
    b = np.concatenate([boxes, found, worse], axis=2)
    assert losses_of(tally({"y": np.moveaxis(a, 1, 2) if swapped else a}, {"y": b}))[0].mean > 0.1


def test_the_first_of_several_classes_gates_nothing() -> None:
    _, boxes, high = faces()
    kinds = np.eye(3)[rng().integers(0, 3, (N, 50))] * np.where(high, 0.9, 0.0)[..., None]
    part = next(p for p in parts_of("y", [np.concatenate([boxes, kinds], axis=2)], Clues()) if p.kind == "scores")
    assert part.gate is None


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_data_in_the_order_of_their_classes_hold_classes(order: slice) -> None:
    """The first samples are all of one class, and so they show one pattern that hardly changes."""
    classes = np.repeat(np.arange(4), 64)[order]
    data = (3 * np.eye(4)[classes] + 0.5 * rng().standard_normal((256, 4))).astype(np.float32)
    model, other = (
        tiny("float[N,4] x => float[N,4] y", "y = Add(x, b)", {"b": np.full(4, n, np.float32)}) for n in (0, 1)
    )
    batches = read({"x": data}, signature_of(model))
    assert parts_of("y", [data[:64]], Clues())[0].kind == "values"
    with Judge(model, batches, ("CPUExecutionProvider",)) as judge:
        assert judge.loss((other, range(len(batches)))).kind == "classes"
        assert judge.loss((other, range(2))).kind == "classes"
    (seen,) = losses_of(run_both(Pair(to_bytes(model), to_bytes(other)), batches))
    assert seen.kind == "classes"
