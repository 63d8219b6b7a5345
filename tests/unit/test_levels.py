"""Outputs of a detector at several resolutions are judged as if they were one output."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from onnxgrail.core import Array
from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.loss import losses_of

N, SIZES = 24, (64, 16, 4)
Outputs = dict[str, Array]


def detector(seed: int, *, sizes: tuple[int, ...] = SIZES) -> tuple[Outputs, Outputs]:
    """Scores and boxes at some sizes, of an original and of a candidate that is a little off."""
    rng = np.random.default_rng(seed)
    original, candidate = Outputs(), Outputs()
    for size in sizes:
        scores = np.where(rng.random((N, size, 1)) < 0.1, rng.uniform(0.4, 0.9, (N, size, 1)), 0.01)
        boxes = rng.normal(size=(N, size, 4)) * 3
        original |= {f"cls{size}": scores, f"box{size}": boxes}
        candidate |= {f"cls{size}": scores * 0.98, f"box{size}": boxes + 0.1 * rng.normal(size=boxes.shape)}
    return original, candidate


def judged(original: Outputs, candidate: Outputs, names: list[str] | None = None) -> dict[str, Any]:
    tally = Tally()
    for start in range(0, N, 7):
        sides = ({n: side[n][start : start + 7] for n in names or original} for side in (original, candidate))
        tally.add(*sides)
    return {loss.output: loss for loss in losses_of(tally)}


def one_output(side: Outputs) -> Outputs:
    return {kind: np.concatenate([side[f"{kind}{size}"] for size in SIZES], axis=1) for kind in ("cls", "box")}


@pytest.mark.parametrize("by_level", [True, False])
def test_levels_have_the_loss_of_one_output_with_all_positions(by_level: bool) -> None:
    original, candidate = detector(1)
    kinds = ("cls", "box")
    order = [f"{k}{s}" for s in SIZES for k in kinds] if by_level else [f"{k}{s}" for k in kinds for s in SIZES]
    levels = judged(original, candidate, order)
    whole = judged(one_output(original), one_output(candidate))
    assert set(levels) == {"cls64, cls16, cls4", "box64, box16, box4"}
    for kind in kinds:
        several, one = levels[", ".join(f"{kind}{size}" for size in SIZES)], whole[kind]
        np.testing.assert_allclose(several.values, one.values)
        assert (several.kind, several.name) == (one.kind, one.name)
        assert several.bound == pytest.approx(one.bound)
        assert several.agreement.value == pytest.approx(one.agreement.value)


def test_two_kinds_of_scores_are_levels_of_two_pyramids() -> None:
    original, candidate = detector(2)
    scores = {name: value for name, value in original.items() if name.startswith("cls")}
    both = scores | {name.replace("cls", "obj"): value for name, value in scores.items()}
    off = {name: candidate[name.replace("obj", "cls")] for name in both}
    assert set(judged(both, off)) == {"cls64, cls16, cls4", "obj64, obj16, obj4"}


def test_a_level_without_objects_and_one_that_is_broken_count() -> None:
    original, candidate = detector(3)
    for side in (original, candidate):
        side["cls4"] = np.full_like(side["cls4"], 0.01)
    assert set(judged(original, candidate)) == {"cls64, cls16, cls4", "box64, box16, box4"}
    candidate["box4"] = np.full_like(candidate["box4"], np.nan)
    worst = next(iter(judged(original, candidate).values()))
    assert worst.output == "box64, box16, box4"
    assert np.isinf(worst.bound)


@pytest.mark.parametrize("sizes", [(64, 60), (64, 8), (64,)])
def test_other_sizes_are_outputs_of_their_own(sizes: tuple[int, ...]) -> None:
    original, candidate = detector(4, sizes=sizes)
    assert set(judged(original, candidate)) == set(original)


def test_maps_without_scores_are_outputs_of_their_own() -> None:
    rng = np.random.default_rng(5)
    maps = {f"map{side}": rng.normal(size=(N, 3, side, side)) for side in (16, 8, 4)}
    off = {name: value + 0.1 * rng.normal(size=value.shape) for name, value in maps.items()}
    assert set(judged(maps, off)) == set(maps)


def test_every_order_of_the_outputs_gives_the_same_losses() -> None:
    original, candidate = detector(6, sizes=(64, 16))
    found = [judged(original, candidate, list(order)) for order in itertools.permutations(original)]
    bounds = [sorted(loss.bound for loss in losses.values()) for losses in found]
    assert all(one == bounds[0] for one in bounds)
    assert all(len(one) == 2 for one in bounds)
