"""Lines of text, of which a model gives letters and blanks at each step, are right or wrong as a whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onnxgrail.core import Array
from onnxgrail.fidelity import Clues, Tally, Verdict, clues_of
from onnxgrail.fidelity.kinds import parts_of

N, STEPS, CLASSES, BLANK = 40, 18, 37, 36


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def written(rng: np.random.Generator, *, lasts: int = 1, classes: int = CLASSES, clear: float = 14.0) -> Array:
    """Raw scores (N, STEPS, classes) of five letters per line, each in some steps, with blanks between them."""
    labels = np.full((N, STEPS), classes - 1)
    for row in labels:
        for place in 3 * np.sort(rng.choice(STEPS // 3, 5, replace=False)):
            row[place : place + lasts] = rng.integers(classes - 1)
    return (clear * np.eye(classes)[labels] + rng.standard_normal((N, STEPS, classes))).astype(np.float32)


def softmax(scores: Array) -> Array:
    chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return chances / chances.sum(axis=-1, keepdims=True)


def line(scores: Array) -> list[int]:
    return [int(label) for label, _ in itertools.groupby(scores.argmax(axis=-1)) if label != BLANK]


def kind(array: Array, clues: Clues | None = None) -> str:
    return parts_of("y", [array], clues or Clues())[0].kind


def judged(a: Array, b: Array) -> Verdict:
    tally = Tally()
    for start in range(0, N, 8):
        tally.add({"y": a[start : start + 8]}, {"y": b[start : start + 8]})
    return tally.results()[0].verdicts[0]


@pytest.mark.parametrize("lasts", [1, 2])
def test_letters_and_blanks_are_text(rng: np.random.Generator, lasts: int) -> None:
    scores = written(rng, lasts=lasts)
    for array in (scores, softmax(scores), np.log(softmax(scores)), scores[:, :, None]):
        assert kind(array) == "text"
        assert kind(np.moveaxis(array, -1, 1)) == "text"


def test_what_lasts_or_has_few_classes_is_no_text(rng: np.random.Generator) -> None:
    assert kind(softmax(written(rng, lasts=3))) == "scores"
    assert kind(softmax(written(rng, classes=5))) == "scores"
    assert kind(softmax(np.tile(written(rng), (1, 40, 1)))) == "scores"  # anchors of a detector
    scores = softmax(written(rng))
    assert kind(scores, Clues(ids=(N, STEPS))) == "scores"  # kinds of words
    outputs: dict[str, Array] = {"y": scores, "boxes": np.zeros((N, STEPS, 4), np.float32)}
    assert kind(scores, clues_of({}, outputs, scores=None, known=True, synthetic=False)) == "scores"
    outputs["boxes"] = np.zeros((N, 5), np.float32)  # the color of a plate
    assert kind(scores, clues_of({}, outputs, scores=None, known=True, synthetic=False)) == "text"


def test_a_line_is_equal_if_its_letters_are(rng: np.random.Generator) -> None:
    a = written(rng)
    b = written(rng)
    b[::2] = a[::2]
    b[::4, 1:] = b[::4, :-1]  # one step later: the same letters
    same = [line(x) == line(y) for x, y in zip(a, b, strict=True)]
    verdict = judged(softmax(a), softmax(b))
    assert verdict.measure == "equal lines of text"
    assert verdict.value == pytest.approx(np.mean(same))
    assert 0.3 < np.mean(same) < 0.7


def test_the_loss_grows_with_the_letters_of_a_line(rng: np.random.Generator) -> None:
    """A letter that is a little less sure in each of five places is five times as likely to change the line."""
    a = softmax(written(rng, clear=30))
    b = a.copy()
    changed = (a.argmax(axis=2) != BLANK)[..., None] & (a > 0.5)
    b[changed] -= 0.02
    b[..., BLANK] += 0.02 * changed.any(axis=2)
    letters = (a.argmax(axis=2) != BLANK).sum(axis=1).mean()
    verdict = judged(a, b)
    assert verdict.value == 1
    assert verdict.loss == pytest.approx(0.02 * letters, rel=0.01)
