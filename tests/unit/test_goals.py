"""Accuracy and perplexity, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnxgrail.core import Labels
from onnxgrail.fidelity import add_batch, finish
from onnxgrail.fidelity.goals import Goals, classes_of

RNG = np.random.default_rng(3)


def judged(a, b, goals, *, mask=None, name="logits"):
    return finish(add_batch({}, {name: a}, {name: b}, mask=mask, goals=goals))[0]


def labels(values, classes=None):
    return Goals(labels=Labels(values=np.asarray(values), classes=classes))


def perplexity(logits, classes):
    """From probabilities, without logarithms of sums."""
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    picked = [row[k] for row, k in zip(chances.reshape(-1, logits.shape[-1]), np.ravel(classes), strict=True) if k >= 0]
    return math.prod(1 / p for p in picked) ** (1 / len(picked))


def test_top1():
    right = np.array([0, 2, 1, -100])
    a = np.eye(3)[[0, 2, 1, 1]]
    b = np.eye(3)[[0, 1, 2, 1]]
    result = judged(a, b, labels(right))
    assert (result.judged, result.top1_reference, result.top1) == (3, 1, pytest.approx(1 / 3))
    assert result.perplexity is None
    assert judged(a, b, labels(right[:, None])).top1 == result.top1
    assert judged(a, b, labels(right, classes=3)).top1 == result.top1


@pytest.mark.parametrize(
    "goals",
    [
        Goals(),
        labels([0, 2, 1, 3]),  # beyond the classes
        labels([0, 2, 1]),
        labels([0, 1, 1, 0], classes=2),  # folders of another sort
        labels([[0, 1, 2, 0]]),
        labels([-1, -1, -1, -1]),
        Goals(tokens=np.array([0, 1, 2, 0])),
    ],
)
def test_nothing_is_told_where_nothing_is_known(goals):
    a = RNG.standard_normal((4, 3))
    result = judged(a, a, goals)
    assert (result.judged, result.top1, result.top1_reference, result.perplexity) == (0, None, None, None)
    assert result.cosine == pytest.approx(1)


def test_only_logits_have_classes():
    a = RNG.standard_normal((4, 3))
    assert judged(a, a, labels([0, 1, 2, 0]), name="pooled").top1 is None


def test_perplexity_of_labelled_tokens():
    a, b = RNG.standard_normal((2, 4, 5, 7))
    right = RNG.integers(0, 7, (4, 5))
    mask = np.ones((4, 5), bool)
    mask[1, 3:] = False
    result = judged(a, b, labels(right), mask=mask)
    known = np.where(mask, right, -1)
    assert result.judged == 18
    assert result.top1 is None
    assert result.perplexity_reference == pytest.approx(perplexity(a, known))
    assert result.perplexity == pytest.approx(perplexity(b, known))


@pytest.mark.parametrize("side", ["left", "right"])
def test_perplexity_of_the_next_token(side):
    a, b = RNG.standard_normal((2, 2, 5, 7))
    tokens = RNG.integers(0, 7, (2, 5))
    mask = np.ones((2, 5), bool)
    mask[1, slice(None, 2) if side == "left" else slice(3, None)] = False
    result = judged(a, b, Goals(tokens=tokens), mask=mask)
    known = np.full((2, 5), -1)
    for row in range(2):
        for place in range(4):
            if mask[row, place] and mask[row, place + 1]:
                known[row, place] = tokens[row, place + 1]
    assert result.judged == 4 + 2
    assert result.perplexity_reference == pytest.approx(perplexity(a, known))
    assert result.perplexity == pytest.approx(perplexity(b, known))


def test_tokens_beyond_the_scores_are_of_another_table():
    assert classes_of(Goals(tokens=np.array([[0, 7]])), (1, 2, 7), None) is None


def test_batches_add_up():
    a, b = RNG.standard_normal((2, 10, 6))
    right = RNG.integers(-1, 6, 10)
    sums = {}
    for rows in (slice(0, 3), slice(3, 10)):
        sums = add_batch(sums, {"y": a[rows]}, {"y": b[rows]}, goals=labels(right[rows]))
    parts, whole = finish(sums)[0], judged(a, b, labels(right), name="y")
    assert (parts.judged, parts.top1, parts.top1_reference) == (whole.judged, whole.top1, whole.top1_reference)


def test_a_ruined_model_has_an_infinite_perplexity():
    a = np.zeros((1, 3, 2))
    b = np.array([[[-9000.0, 0]] * 3])
    assert judged(a, b, labels([[0, 0, 0]])).perplexity == math.inf
