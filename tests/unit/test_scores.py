"""The highest scores of a sample against sorting all of them; losses alone against losses with all other sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.core import Array
from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.loss import worst_loss
from onnxgrail.fidelity.measures.scores import nth_highest


@given(st.integers(0, 1000), st.integers(1, 900), st.integers(1, 40), st.sampled_from([0, 1, 4, 1000]))
def test_the_nth_highest_is_that_of_all_in_order(seed: int, count: int, share: int, levels: int) -> None:
    scores = np.random.default_rng(seed).random((3, count))
    scores = np.round(scores * levels) / max(levels, 1)  # equal scores, and all of them
    place = max(1, count // share)
    np.testing.assert_array_equal(nth_highest(scores, place), np.sort(scores, axis=1)[:, -place, None])


@pytest.mark.parametrize("every", [0.0, 1.0])
def test_where_the_bound_is_far_off(every: float) -> None:
    scores = np.random.default_rng(0).random((1, 6400)) / 2
    scores[:, ::64] = every  # the scores that give the bound
    np.testing.assert_array_equal(nth_highest(scores, 64), np.sort(scores, axis=1)[:, -64, None])


def outputs(kind: str, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the outputs of two models on 20 samples, of which the first five have low scores."""
    shape = {"classes of pixels": (20, 12, 9, 4), "boxes": (20, 50, 9), "mask": (20, 16, 16, 1), "faint": (20, 300)}[
        kind
    ]
    logits = 3 * rng.standard_normal(shape)
    logits[:5] -= 6
    both = [logits, logits + 0.3 * rng.standard_normal(shape)]
    if kind == "classes of pixels":
        both = [np.exp(one) / np.exp(one).sum(axis=-1, keepdims=True) for one in both]
    else:
        both = [1 / (1 + np.exp(-one)) for one in both]
    if kind == "boxes":
        both = [np.concatenate([300 * one[..., :4], one[..., 4:]], axis=2) for one in both]
    wanted, got = (one.astype(np.float32) * (0.05 if kind == "faint" else 1) for one in both)
    return wanted, got


@given(st.integers(0, 1000), st.sampled_from(["classes of pixels", "boxes", "mask", "faint"]), st.integers(1, 20))
def test_losses_alone(seed: int, kind: str, batch: int) -> None:
    wanted, got = outputs(kind, np.random.default_rng(seed))
    losses = []
    for brief in (False, True):
        tally = Tally(brief=brief)
        for start in range(0, 20, batch):
            tally.add({"scores": wanted[start : start + batch]}, {"scores": got[start : start + batch]})
        losses.append(worst_loss(tally))
    every, alone = losses
    assert every is not None
    assert alone is not None
    np.testing.assert_array_equal(alone.values, every.values)
    assert (alone.kind, alone.name, alone.bound) == (every.kind, every.name, every.bound)
    assert every.kind in ("scores", "values")
    assert every.mean > 0


def pixels(rng: np.random.Generator, size: int, noise: Array) -> tuple[Array, Array]:
    """Return probabilities of 5 classes at size x size pixels in four samples, and others as far from them as told."""
    coarse = rng.standard_normal((4, 8, 8, 5))
    logits = 6 * np.kron(coarse, np.ones((1, size // 8, size // 8, 1)))
    both = [np.exp(one) for one in (logits, logits + noise[:, None, None, None] * rng.standard_normal(logits.shape))]
    wanted, got = (np.asarray(one / one.sum(axis=-1, keepdims=True), np.float32) for one in both)
    return wanted, got


def test_losses_alone_read_some_pixels_of_large_maps() -> None:
    """Maps at two scales are judged as one; the large one weighs as much as if every pixel was read."""
    rng, noise = np.random.default_rng(0), np.array([0.3, 1.0, 2.0, 4.0])
    maps = {"scores/a": pixels(rng, 320, noise), "scores/b": pixels(rng, 160, 2 * noise)}
    losses = []
    for brief in (False, True):
        tally = Tally(brief=brief)
        tally.add(*({name: both[side] for name, both in maps.items()} for side in (0, 1)))
        losses.append(worst_loss(tally))
    every, alone = losses
    assert every is not None
    assert alone is not None
    assert (alone.kind, alone.name, alone.output) == (every.kind, every.name, every.output)
    np.testing.assert_allclose(alone.values, every.values, rtol=0.05)
    assert (alone.values != every.values).all()
