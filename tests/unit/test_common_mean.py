"""Outputs that are nearly the same in all samples are judged by what differs, heat maps by their peaks."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.core import Array
from onnxgrail.fidelity import Clues, Tally, Verdict
from onnxgrail.fidelity.kinds import parts_of
from onnxgrail.fidelity.kinds.part import COMMON, SEEN, Part
from onnxgrail.fidelity.measures.values import CENTERED, VALUES

RNG = np.random.default_rng(11)
N = 120


def around(*shape: int, share: float = 0.1, low: float = 0.2, high: float = 0.8) -> Array:
    """Numbers between two bounds, the same in all samples but for a share."""
    mean = RNG.uniform(low, high, shape)
    return (mean + share * np.abs(mean).mean() * RNG.standard_normal((N, *shape))).astype(np.float32)


def peaks(*shape: int, floor: float = 0.02) -> Array:
    """Heat maps with noise around 0 and a few peaks of about 1, some above."""
    noise = floor * RNG.standard_normal((N, *shape))
    return np.where(RNG.random(noise.shape) < 0.01, RNG.uniform(0.4, 1.1, noise.shape), noise).astype(np.float32)


def part(name: str, array: Array, **clues: bool) -> Part:
    return parts_of(name, [array], Clues(**clues))[0]


def judged(name: str, a: Array, b: Array, each: int = 8) -> Verdict:
    tally = Tally()
    for start in range(0, N, each):
        tally.add({name: a[start : start + each]}, {name: b[start : start + each]})
    return tally.results()[0].verdicts[0]


ALIKE = {
    "a row of points": ("output", around(136)),
    "a row of points by its name": ("landmarks", around(136)),
    "points of both signs": ("y", around(63, low=-40, high=180)),
    "a list of points": ("y", 100 * around(68, 2)),
    "a list of points by its name": ("keypoints", 100 * around(21, 3)),
    "points with their axes in front": ("y", 100 * around(3, 33)),
    "maps of offsets": ("y", around(6, 9, 9, low=-3, high=3)),
    "colors of little contrast": ("y", np.clip(around(2, 16, 16, low=0.45, high=0.55), 0, 1)),
    "a row by the name of a forecast": ("forecast", around(24, low=-1, high=1)),
    "temperatures of the next hours": ("y", around(24, share=0.05, low=19.5, high=20.5)),
    "a few numbers of both signs": ("y", around(4, low=-0.5, high=0.5)),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_constant_answer_loses_all(case: str) -> None:
    name, a = ALIKE[case]
    constant = np.broadcast_to(a.mean(axis=0), a.shape)
    assert np.square(a - constant).sum() < 0.05 * np.square(a).sum()
    verdict = judged(name, a, constant)
    assert (verdict.kind, verdict.measure) == ("values", "NMSE about the mean of the samples")
    assert verdict.value == pytest.approx(1, rel=0.1)


DIFFERENT = {
    "a wave": ("wav", RNG.standard_normal((N, 400))),
    "a map without a mean": ("y", RNG.standard_normal((N, 8, 9, 9))),
    "anchors": ("y", around(2000, 4, high=9)),
    "features of words": ("y", around(30, 40, low=-3, high=3)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_other_values_have_no_common_mean(case: str) -> None:
    name, array = DIFFERENT[case]
    assert part(name, array).kind == "values"
    assert part(name, array).center is None


@pytest.mark.parametrize("case", ALIKE)
def test_few_or_random_samples_have_no_common_mean(case: str) -> None:
    name, array = ALIKE[case]
    assert part(name, array[: SEEN - 1]).center is None
    assert part(name, array, synthetic=True).center is None


@pytest.mark.parametrize("low", [0.75, 0.95])
def test_points_that_leave_the_unit_interval_later(low: float) -> None:
    """The first samples look like scores or shares; what follows shows that they are none."""
    a = around(136, share=0.05)
    a[:64] = np.clip(a[:64], 0.05, low)
    a[90:, :3] = 1.2
    for each in (1, 8, 40):
        verdict = judged("output", a, np.broadcast_to(a.mean(axis=0), a.shape), each)
        assert verdict.measure == "NMSE about the mean of the samples"
        assert verdict.value == pytest.approx(0.8, abs=0.2)


def test_scores_that_leave_the_unit_interval_later() -> None:
    """Sums of the samples before and after are of one kind, whatever the batches are."""
    a = np.square(RNG.uniform(0, 1, (N, 30))).astype(np.float32)
    a[80:] *= 3
    b = (a + 0.1 * RNG.standard_normal(a.shape)).astype(np.float32)
    found = [judged("y", a, b, each) for each in (1, 8, 40)]
    assert {(v.measure, v.why) for v in found} == {("NMSE", "other values or shapes in later samples")}
    assert found[0].value == pytest.approx(np.square(a - b).sum() / np.square(a).sum())
    assert found[0].value == pytest.approx(found[1].value) == pytest.approx(found[2].value)


@pytest.mark.parametrize("name", ["y", "heatmaps"])
def test_heat_maps_are_scores_beyond_the_unit_interval(name: str) -> None:
    a = peaks(5, 32, 32)
    assert a.min() < 0
    assert a.max() > 1
    b = np.where((a > 0.5) & (RNG.random(a.shape) < 0.5), 0.0, a)
    verdict = judged(name, a, b)
    kept = ((a > 0.5) & (b > 0.5)).sum() / (a > 0.5).sum()
    assert verdict.kind == "scores"
    assert verdict.value == pytest.approx(2 * kept / (1 + kept))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize("brief", [False, True])
def test_levels_count_by_their_size(dtype: type, brief: bool) -> None:
    """Images and waves in whole numbers are not just equal or not."""
    a = RNG.integers(0, 100, (N, 3, 9, 9)).astype(dtype)
    b = np.clip(a + RNG.integers(-9, 9, a.shape), 0, 100).astype(dtype)
    tally = Tally(brief=brief)
    tally.add({"y": a}, {"y": b})
    x, y = a.astype(float), b.astype(float)
    assert tally.results()[0].verdicts[0].value == pytest.approx(np.square(x - y).sum() / np.square(x).sum())


def test_maps_beside_heat_maps_are_no_scores() -> None:
    both = np.concatenate([peaks(4, 16, 16), around(8, 16, 16)], axis=1)
    assert part("y", both).kind == "values"


@pytest.mark.parametrize("shape", [(1,), (4,), (68, 2), (3, 8, 8)])
def test_what_is_always_0_has_no_common_mean(shape: tuple[int, ...]) -> None:
    zeros = np.zeros((N, *shape), np.float32)
    assert part("y", zeros).center is None
    assert judged("y", zeros, zeros).value == 0


def test_both_losses_are_equal_where_one_takes_over() -> None:
    assert pytest.approx(1 - CENTERED.scale / VALUES.scale, abs=0.005) == COMMON


def test_class_scores_around_a_common_mean_are_judged_as_classes_too() -> None:
    """As of a classifier with a thousand classes, all of whose logits are far below 0."""
    logits = np.float32(-70) + 15 * RNG.standard_normal((N, 1098)).astype(np.float32)
    values, classes = parts_of("linear", [logits], Clues())
    assert values.center is not None
    assert classes.kind == "classes"
    columns = np.float32(-70) + 15 * RNG.standard_normal((N, 1024)).astype(np.float32)  # as long as vectors are
    assert [found.kind for found in parts_of("linear", [columns], Clues())] == ["values"]
