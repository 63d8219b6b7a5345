"""Sequences of symbols that a loop writes, and labels that are only counted."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.allocation.found import Judged
from onnxgrail.core import Array
from onnxgrail.fidelity import Clues, Tally
from onnxgrail.fidelity.intervals import of_count, unseen_share
from onnxgrail.fidelity.kinds import parts_of
from onnxgrail.fidelity.lists import LISTED, WRITTEN, Lists
from onnxgrail.fidelity.loss import Loss, worst_loss
from onnxgrail.fidelity.measures.scores import SEQUENCES
from onnxgrail.finishing.empty import _samples

COLUMNS = 6
LENGTHS = (3, 7, 5, 4) * 5


def steps(length: int, *, seed: int, sharp: float = 8.0) -> Array:
    """One distribution per step, (1, length, COLUMNS)."""
    logits = sharp * np.eye(COLUMNS)[np.random.default_rng(seed).integers(COLUMNS, size=length)]
    shares = np.exp(logits)
    return (shares / shares.sum(axis=-1, keepdims=True))[None].astype(np.float32)


def judged(pairs: list[tuple[Array, Array]]) -> Loss:
    """Judge pairs of sequences, one after the other, as models with lists are."""
    clues = Clues()
    lists, tally = Lists({"y": (1,)}, clues.lists), Tally(clues)
    for wanted, got in pairs:
        tally.add(*lists.leveled({"x": np.zeros((1, 4))}, {"y": wanted}, {"y": got}), single=True)
    found = worst_loss(tally)
    assert found is not None
    return found


def test_equal_sequences_lose_nothing() -> None:
    alike = [steps(length, seed=number) for number, length in enumerate(LENGTHS)]
    found = judged([(one, one) for one in alike])
    assert (found.kind, found.name, found.mean) == ("sequences", SEQUENCES.loss, 0)
    assert found.agreement.value == 1
    assert found.agreement.interval == of_count(len(LENGTHS), len(LENGTHS))


def test_the_loss_is_the_sum_over_the_steps() -> None:
    pairs = [(steps(n, seed=k), steps(n, seed=k, sharp=7.5)) for k, n in enumerate(LENGTHS)]
    wanted = [0.5 * np.abs(a - b).sum() for a, b in pairs]
    found = judged(pairs)
    np.testing.assert_allclose(found.values, 0.8 * np.array(wanted), rtol=1e-3)
    assert found.agreement.value == 1
    assert found.mean < found.bound < 1


def test_a_step_that_one_model_lacks_makes_another_sequence() -> None:
    whole = [steps(n, seed=k) for k, n in enumerate(LENGTHS)]
    short = [whole[0][:, :-1], *whole[1:]]
    for pairs in (list(zip(whole, short, strict=True)), list(zip(short, whole, strict=True))):
        found = judged(pairs)
        np.testing.assert_allclose(found.values, [0.8] + [0.0] * (len(LENGTHS) - 1), atol=1e-6)
        assert found.agreement.value == pytest.approx(1 - 1 / len(LENGTHS))


def test_other_symbols_after_the_first_other_one_count_once() -> None:
    pairs = [(steps(n, seed=k), steps(n, seed=k + 100)) for k, n in enumerate(LENGTHS)]
    assert judged(pairs).mean == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (steps(5, seed=0), WRITTEN),
        (np.concatenate([steps(5, seed=0), np.zeros((1, 2, COLUMNS))], axis=1), WRITTEN),
        (2 * steps(5, seed=0), LISTED),
        (-steps(5, seed=0), LISTED),
        (np.zeros((1, 2, COLUMNS)), LISTED),
        (np.ones((1, 5, 1)), LISTED),  # scores that are all 1
        (np.ones((5, 1)), LISTED),
    ],
)
def test_lists_of_distributions_are_sequences(array: Array, why: str) -> None:
    (part,) = parts_of("y", [array], Clues(lists={"y"}))
    assert part.why == why


def test_equal_labels_are_no_proof() -> None:
    labels, images = np.arange(24) % 3, np.zeros((24, 8, 8), np.int64)
    for array in (labels, images):
        tally = Tally()
        tally.add({"y": array}, {"y": array.copy()})
        found = worst_loss(tally)
        assert found is not None
        assert found.mean == 0
        assert found.bound == pytest.approx(0.8 * unseen_share(array.size))
        assert found.agreement.interval == of_count(array.size, array.size)


def test_labels_beside_scores_leave_the_bound_to_them() -> None:
    labels, scores = np.arange(24) % 3, np.eye(3)[np.arange(24) % 3] * 0.8 + 0.2 / 3
    tally = Tally()
    tally.add({"y": labels, "p": scores}, {"y": labels, "p": scores})
    found = worst_loss(tally)
    assert found is not None
    assert found.bound == 0


def test_the_share_of_what_no_sample_shows() -> None:
    assert unseen_share(0) == 1
    assert unseen_share(1) == pytest.approx(0.95)
    assert (1 - unseen_share(300)) ** 300 == pytest.approx(0.05)


def test_a_refusal_says_how_many_labels_would_do() -> None:
    loss = Judged(
        output="y",
        name="share of other values",
        part="",
        kind="labels",
        mean=0.0,
        bound=0.0185,
        samples=128,
        agreement={},
    )
    assert _samples(loss, 0.01).startswith("about 237 samples")
