"""The kind of each output, and the measure that suits it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.core import Array
from onnxgrail.fidelity import Clues, Fidelity, Tally, Verdict, clues_of, entries, headline
from onnxgrail.fidelity import tally as tallies
from onnxgrail.fidelity.intervals import of_count
from onnxgrail.fidelity.kinds import parts_of
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.words import told

RNG = np.random.default_rng(5)
N = 24
IDS = Clues(ids=(N, 6))


def softmax(values: Array, axis: int = -1) -> Array:
    shifted = np.exp(values - values.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


def normal(*shape: int, scale: float = 1.0) -> Array:
    return (RNG.standard_normal((N, *shape)) * scale).astype(np.float32)


def sparse(*shape: int, share: float = 0.02) -> Array:
    """Scores in 0..1 that are near 0 at most positions."""
    scores = RNG.random((N, *shape)) * 0.02
    return np.where(RNG.random(scores.shape) < share, RNG.uniform(0.6, 1, scores.shape), scores).astype(np.float32)


def detections(boxes: Array, *shape: int) -> Array:
    """Four columns of boxes, then scores."""
    return np.concatenate([boxes, sparse(*shape)], axis=-1)


def background(classes: int, *positions: int) -> Array:
    """Rows of which most are of class 0."""
    labels = RNG.choice(classes, (N, *positions), p=[0.94] + [0.06 / (classes - 1)] * (classes - 1))
    return softmax(6 * np.eye(classes)[labels] + 0.1 * normal(*positions, classes))


def landmarks(count: int) -> Array:
    """Points of a face: nearly the same in every sample."""
    return (np.linspace(5, 180, count) + normal(count, scale=3)).astype(np.float32)


def judged(name: str, a: Array, b: Array, *, each: int = 8, clues: Clues | None = None, **options: Any) -> Fidelity:
    """Return the verdict on an output that is given in batches."""
    tally = Tally(clues)
    for start in range(0, len(a), each):
        cut = slice(start, start + each)
        tally.add({name: a[cut]}, {name: b[cut]}, **options)
    return tally.results()[0]


def top(name: str, a: Array, b: Array, **options: Any) -> Verdict:
    """The verdict on the worst part."""
    return judged(name, a, b, **options).verdicts[0]


CASES: dict[str, tuple[str, Array, tuple[str, ...], Clues]] = {
    "probabilities": ("y", softmax(normal(10)), ("classes",), Clues()),
    "logarithms of probabilities": ("y", np.log(softmax(normal(10))), ("classes",), Clues()),
    "logarithms for each token": ("y", np.log(softmax(normal(7, 9))), ("scores",), Clues()),
    "raw class scores": ("logits", 9 * softmax(normal(10)) - 1, ("classes",), Clues()),
    "raw scores of labels": ("logits", normal(10), ("classes", "scores"), Clues()),
    "raw scores without a telling name": ("output", normal(100, scale=8), ("classes",), Clues()),
    "one score": ("y", sparse(1), ("classes",), Clues()),
    "risks": ("y", np.clip(0.05 + 0.03 * normal(1), 0, 0.4), ("classes", "values"), Clues()),
    "chances near each other": ("y", np.clip(0.5 + 0.03 * normal(1), 0.3, 0.7), ("classes", "values"), Clues()),
    "chances of what is never there": ("y", 0.02 + 0.001 * RNG.random((N, 1)), ("classes",), Clues()),
    "one raw score by its name": ("score", normal(1), ("classes", "values"), Clues()),
    "one number": ("y", normal(1, scale=30), ("values",), Clues()),
    "ratings": ("y", 3 + normal(3, scale=0.3), ("values",), Clues()),
    "a rating by its name": ("score", 3 + normal(1, scale=0.3), ("values",), Clues()),
    "an embedding above 0": ("output", 0.01 + RNG.exponential(2.0, (N, 100)), ("embedding",), Clues()),
    "what a ReLU leaves": ("output", np.maximum(normal(100, scale=8), 0), ("embedding",), Clues()),
    "many labels": ("y", sparse(40), ("scores",), Clues()),
    "a mask": ("y", (normal(1, 16, 16) > 1).astype(np.float32), ("scores",), Clues()),
    "an image": ("y", RNG.random((N, 3, 16, 16)), ("values",), Clues()),
    "an image in 0..255": ("y", 120 + normal(1, 16, 16, scale=70) + normal(3, 16, 16, scale=20), ("values",), Clues()),
    "three classes": ("y", 50 * np.eye(3)[RNG.integers(3, size=(N, 16, 16))] - 10, ("scores",), Clues()),
    "anchors": ("y", background(2, 200), ("scores",), Clues()),
    "a map of classes": ("y", np.moveaxis(background(5, 12, 12), -1, 1), ("scores",), Clues()),
    "a raw map of classes": ("y", 20 * np.moveaxis(background(5, 12, 12), -1, 1) - 7, ("scores",), Clues()),
    "raw anchors": ("classificators", np.where(sparse(200, 1) > 0.5, 2.0, -30.0), ("scores",), Clues()),
    "rare ends of sentences": ("y", np.where(sparse(200, 2) > 0.5, 8.0, -9.0), ("scores",), Clues()),
    "detections": ("y", detections(normal(50, 4), 50, 6), ("scores", "values"), Clues()),
    "detections in columns": ("y", np.moveaxis(detections(normal(50, 4), 50, 6), 1, 2), ("scores", "values"), Clues()),
    "boxes in shares": ("y", detections(0.2 + 0.6 * RNG.random((N, 50, 4)), 50, 6), ("scores", "values"), Clues()),
    "boxes": ("boxes", RNG.random((N, 50, 4)), ("values",), Clues()),
    "points": ("conv2d_20", landmarks(300)[..., None, None], ("values",), Clues()),
    "an embedding": ("embedding", normal(128), ("embedding",), Clues()),
    "an embedding of length 1": ("y", np.linalg.qr(normal(64).T)[0].T, ("embedding",), Clues()),
    "close scores of classes": ("output", normal(100), ("embedding", "classes"), Clues()),
    "large scores of classes": ("output", normal(43, scale=20), ("embedding", "classes"), Clues()),
    "a series of large numbers": ("output", normal(100, scale=300), ("embedding",), Clues()),
    "an embedding by its values": ("output", normal(400, scale=0.1), ("embedding",), Clues()),
    "an embedding of large numbers": ("output", normal(96, scale=16), ("embedding",), Clues()),
    "frequencies": ("pitch", np.abs(normal(101, scale=200)), ("values",), Clues()),
    "hidden states": ("last_hidden_state", normal(6, 128), ("embedding",), IDS),
    "next tokens": ("logits", normal(6, 61), ("tokens",), Clues(ids=(N, 6), predicts=True)),
    "a vocabulary": ("logits", normal(6, 1200), ("tokens",), IDS),
    "kinds of tokens": ("logits", normal(6, 9), ("scores",), IDS),
    "waves": ("y", normal(1, 400, scale=0.1), ("values",), Clues()),
    "features": ("y", normal(32, 9, 9), ("values",), Clues()),
    "whole numbers": ("y", RNG.integers(0, 9, (N, 5)), ("labels",), Clues()),
    "8-bit levels": ("y", RNG.integers(0, 255, (N, 50)).astype(np.uint8), ("values",), Clues()),
    "a cache": ("present.0.key", normal(2, 5, 4), ("state",), Clues(fed={"past_key_values.0.key": (N, 2, 4, 4)})),
    "numbers of a box": ("dense_5", normal(4, scale=0.1), ("values",), Clues()),
    "a cell state": ("cn", normal(1, 3), ("state",), Clues(fed={"h": (N, 1, 3), "c": (N, 1, 3)})),
    "a state": ("stateN", normal(3), ("state",), Clues(fed={"state": (N, 3)})),
    "another cache": (
        "present.0.key",
        normal(2, 5, 4),
        ("values",),
        Clues(fed={"past_key_values.1.key": (N, 2, 4, 4)}),
    ),
    "nothing": ("y", np.zeros((N, 0, 3)), ("values",), Clues()),
    "not a number": ("y", np.full((N, 3), np.nan), ("values",), Clues()),
    "a text that is read": ("387", 20 * np.eye(60)[RNG.integers(40, size=(N, 9))] - 9, ("scores",), Clues()),
    "a text by itself": ("387", 20 * np.eye(1200)[RNG.integers(40, size=(N, 9, 1))] - 9, ("scores",), Clues()),
    "vectors of large numbers": ("387", normal(9, 1200, scale=8), ("values",), Clues()),
    "vectors with large columns": ("387", 20 * np.eye(1200)[RNG.integers(3, size=(N, 9))] - 1, ("values",), Clues()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_an_output_holds(case: str) -> None:
    name, array, kinds, clues = CASES[case]
    assert tuple(part.kind for part in parts_of(name, [array], clues)) == kinds
    same = judged(name, array, array.copy(), clues=clues)
    assert {verdict.kind for verdict in same.verdicts} == set(kinds)
    for verdict in same.verdicts:
        assert verdict.value in (None, pytest.approx(1 if verdict.higher else 0))
        assert verdict.loss is None or verdict.loss == pytest.approx(0, abs=1e-6)
        assert verdict.why


def test_class_scores() -> None:
    a = np.eye(4)[RNG.integers(0, 4, 20)] * 0.7 + 0.075
    b = a.copy()
    b[:5] = np.roll(a[:5], 1, axis=1)
    verdict = top("y", a, b)
    assert (verdict.measure, verdict.value) == ("top-1 agreement", 0.75)
    assert verdict.interval == pytest.approx(of_count(15, 20))
    assert verdict.lowest == pytest.approx(-0.7)
    assert verdict.loss == pytest.approx(0.25 * 0.7)  # total variation
    assert verdict.details["margin_reference"] == pytest.approx(0.7)
    assert verdict.details["margin"] == pytest.approx(0.75 * 0.7 - 0.25 * 0.7)


def test_a_cosine_does_not_hide_lost_detections() -> None:
    """Half of what a detector finds is lost, and the vectors are nearly the same."""
    a = detections(10 * normal(200, 4), 200, 6)
    b = a.copy()
    scores = b[..., 4:]
    scores[(scores > 0.5) & (RNG.random(scores.shape) < 0.5)] = 0.05
    found = judged("output", a, b)
    assert found.cosine is not None
    assert found.cosine > 0.999
    first = found.verdicts[0]
    assert (first.kind, first.part) == ("scores", "columns 4 to 9")
    kept = ((a[..., 4:] > 0.5) & (scores > 0.5)).sum() / (a[..., 4:] > 0.5).sum()
    assert first.value == pytest.approx(2 * kept / (1 + kept))
    assert first.interval is not None
    assert first.interval[0] < first.value < first.interval[1] < 0.9
    assert first.loss is not None
    assert first.loss > 0.3


def test_the_background_does_not_count() -> None:
    a = background(3, 500)
    b = a.copy()
    found = a.argmax(-1) != 0
    lost = found & (RNG.random(found.shape) < 0.5)
    b[lost] = softmax(np.array([6.0, 0, 0]))
    verdict = top("scores", a, b)
    assert verdict.measure == "F1 of positions that are not of class 0"
    assert (a.argmax(-1) == b.argmax(-1)).mean() > 0.95
    kept = 1 - lost.sum() / found.sum()
    assert verdict.value == pytest.approx(2 * kept / (1 + kept))


def test_scores_below_a_half_are_judged_by_the_highest() -> None:
    a = (0.4 * RNG.random((N, 300, 2))).astype(np.float32)
    verdict = top("scores", a, np.where(a > 0.38, a - 0.3, a))
    assert verdict.measure == "overlap of the top 1 % of scores"
    assert verdict.value == pytest.approx(0, abs=0.05)


def test_few_detections_leave_a_wide_interval() -> None:
    """Two of two that are lost do not say that all are."""
    a = np.zeros((N, 100, 1))
    a[3, 7], a[5, 9] = 0.9, 0.8
    verdict = top("scores", a, np.zeros_like(a))
    assert verdict.value == 0
    assert verdict.interval == pytest.approx(of_count(0, 1))


def test_next_tokens() -> None:
    a, b = normal(6, 40), normal(6, 40)
    mask = np.ones((N, 6), bool)
    mask[:, 4:] = False
    clues = Clues(ids=(N, 6), predicts=True)
    tally = Tally(clues)
    tally.add({"logits": a}, {"logits": b}, mask=mask)
    found = tally.results()[0]
    p, q = softmax(a.astype(float)), softmax(b.astype(float))
    kl = (p * np.log(p / q)).sum(-1)[:, :4]
    verdict = found.verdicts[0]
    assert verdict.measure == "KL divergence per token"
    assert verdict.value == pytest.approx(kl.mean(), rel=1e-5)
    assert verdict.lowest == pytest.approx(kl.mean(1).max(), rel=1e-5)
    assert verdict.details["perplexity_factor"] == pytest.approx(np.exp(kl.mean()), rel=1e-5)


def test_values_and_their_worst_channel() -> None:
    a = normal(8, 5, 5)
    b = a.copy()
    b[:, 3] *= 0.5
    verdict = top("y", a, b)
    assert verdict.value == pytest.approx(((a - b) ** 2).sum() / (a**2).sum(), rel=1e-5)
    assert verdict.details["channel"] == 3
    assert verdict.details["worst_channel"] == pytest.approx(0.25, rel=1e-4)
    assert 0 < verdict.details["unexplained"] < 0.1


@pytest.mark.parametrize("a", [landmarks(300), 5 + normal(3, scale=0.3), 40 + normal(1, scale=3)])
def test_points_of_a_face_and_ratings_count_from_their_mean(a: Array) -> None:
    """Their energy is that of the mean: an error as large as what tells faces apart hides in it."""
    b = np.broadcast_to(a.mean(0), a.shape)
    found = judged("conv2d_20", a, b)
    assert found.nmse is not None
    assert found.nmse < 0.01
    verdict = found.verdicts[0]
    assert verdict.measure == "NMSE about the mean of the samples"
    assert verdict.value == pytest.approx(1, abs=0.1)


def test_each_of_a_few_numbers_counts_by_its_own_spread() -> None:
    """An age beside a rating, of which all that tells samples apart is lost."""
    a = np.concatenate([40 + normal(1, scale=9), 3 + normal(1, scale=0.2)], axis=1)
    b = np.concatenate([a[:, :1], np.broadcast_to(a[:, 1:].mean(), (N, 1))], axis=1)
    assert top("y", a, b).value == pytest.approx(0.5, abs=0.2)


def test_embeddings_per_token_without_padding() -> None:
    a, b = normal(6, 80), normal(6, 80)
    mask = np.ones((N, 6), bool)
    mask[:, 2:] = False
    tally = Tally(IDS)
    tally.add({"hidden": a}, {"hidden": b}, mask=mask)
    x, y = a[:, :2], b[:, :2]
    cosines = (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    verdict = tally.results()[0].verdicts[0]
    assert verdict.value == pytest.approx(cosines.mean(), rel=1e-4)
    assert verdict.lowest == pytest.approx(cosines.mean(1).min(), rel=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("each", [1, 5, 24])
def test_batches_make_no_difference(case: str, each: int) -> None:
    name, array, _, clues = CASES[case]
    other = np.roll(array, 1, axis=0)
    whole, parts = (judged(name, array, other, each=size, clues=clues) for size in (16, each))
    assert len(whole.verdicts) == len(parts.verdicts)
    for one, two in zip(whole.verdicts, parts.verdicts, strict=True):
        assert one.value == pytest.approx(two.value, rel=1e-6)
        assert one.loss == pytest.approx(two.loss, rel=1e-6)


def test_outputs_too_large_to_wait_are_measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"map": normal(3, 8), "logits": normal(5), "hidden": normal(6, 80)}
    got = {name: np.roll(value, 1, axis=0) for name, value in wanted.items()}

    def found(limit: int) -> dict[str, float]:
        monkeypatch.setattr(tallies, "HELD", limit)
        both = Tally()
        for start in range(0, N, 16):
            cut = slice(start, start + 16)
            both.add({k: v[cut] for k, v in wanted.items()}, {k: v[cut] for k, v in got.items()})
        return {one.name: one.verdicts[0].value for one in both.results()}

    assert found(0) == found(2**26)
    assert set(found(wanted["logits"].nbytes * 2)) == set(wanted)


def test_what_holds_something_else_later_holds_values() -> None:
    a = np.concatenate([sparse(20, 4)] * 4)
    a[80:] += 3
    verdict = top("y", a, 0.9 * a)
    assert (verdict.kind, verdict.measure) == ("values", "NMSE")
    assert verdict.value == pytest.approx(0.01, rel=1e-4)
    assert "later" in verdict.why


def test_broken_values_come_first() -> None:
    a = normal(10)
    b = a.copy()
    b[3, 2] = np.nan
    tally = Tally()
    tally.add({"fine": a, "broken": a}, {"fine": normal(10), "broken": b})
    found = headline(tally.results())
    assert found is not None
    assert (found["output"], found["value"]) == ("broken", None)
    words = told(found, {"on": "held-out", "samples": N})
    assert (words.value, words.far) == ("not a number", True)


def test_the_headline_is_the_worst_output_and_no_state() -> None:
    a = {"y": softmax(normal(5)), "z": softmax(normal(5)), "state": normal(6)}
    b = {"y": a["y"], "z": np.roll(a["z"], 1, axis=0), "state": normal(6)}
    clues = Clues(fed={"state_in": (N, 6)})
    for order in (("y", "z", "state"), ("state", "z", "y")):
        tally = Tally(clues)
        tally.add({n: a[n] for n in order}, {n: b[n] for n in order})
        found = headline(tally.results())
        assert found is not None
        assert found["output"] == "z"
        assert entries(tally.results())[0]["verdicts"][0]["kind"] in ("classes", "state")
    tally = Tally(clues)
    tally.add({"state": a["state"]}, {"state": b["state"]})
    found = headline(tally.results())
    assert found is not None
    assert found["output"] == "state"
    assert headline(()) is None


def test_clues() -> None:
    feed = {"ids": np.zeros((2, 7), np.int64), "state": np.zeros((2, 3), np.float32), "sr": np.zeros((), np.int64)}
    known = clues_of(feed, {}, scores="ids", known=True, synthetic=False)
    assert (known.ids, known.predicts, dict(known.fed)) == ((2, 7), True, {"state": (2, 3)})
    assert not clues_of(feed, {}, scores=None, known=True, synthetic=False).predicts
    assert clues_of(feed, {}, scores=None, known=False, synthetic=True).predicts, "nobody knows that it does not"


def test_a_part_has_no_hidden_defaults() -> None:
    part = Part(kind="values", why="w")
    assert (part.form, part.axis, part.columns, part.rows, part.dominant, part.center, part.units) == (
        *("values", None, None),
        *(False, None, None, None),
    )
