"""Images faded into one another: what they are made of, that held-out ones stay out, and how many steps they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.methods.refine import distill
from onnxgrail.methods.refine.distill import blended, faded, image
from onnxgrail.methods.refine.refinement import Refinement
from tests.tiny import tiny

BATCH, SIDE = 4, 6


def images(batches: int = 10) -> dict[str, Any]:
    """Every batch has a pixel of its own that is lit."""
    found = np.zeros((batches * BATCH, 1, SIDE, SIDE), np.float32)
    for number in range(batches):
        found[number * BATCH : (number + 1) * BATCH, 0, number // SIDE, number % SIDE] = 1
    return {"x": found}


def network() -> ir.Model:
    """Two convolutions."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=s).astype(np.float32) / 2 for n, s in {"w": (8, 1, 3, 3), "v": (4, 8, 3, 3)}.items()}
    text = "a = Conv<pads=[1,1,1,1]>(x, w)\nb = Relu(a)\ny = Conv<pads=[1,1,1,1]>(b, v)"
    return tiny(f"float[N,1,{SIDE},{SIDE}] x => float[N,4,{SIDE},{SIDE}] y", text, weights)


def refined(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> tuple[Refinement, Refinement, int]:
    """The job before and after blends were made, and how many steps the fit was told to take."""
    seen: list[Refinement] = []
    steps: list[int] = []
    whole = distill.whole

    def spy(job: Refinement, times: int) -> Refinement:
        seen.extend([job, blended(job, times)])
        return seen[-1]

    def counted(job: Any, kind: str, names: Any, progress: Any, descent: distill.Descent) -> Any:
        steps.append(descent.steps)
        return whole(job, kind, names, progress, descent)

    monkeypatch.setattr(distill, "blended", spy)
    monkeypatch.setattr(distill, "whole", counted)
    onnxgrail.compress(
        ir.to_proto(network()),
        data=given,
        held_out=0,
        unit_ratio=0.5,
        round_to=1,
        check=False,
        refine="distill",
        batch_size=BATCH,
    )
    return seen[0], seen[1], steps[0]


def test_a_blend_is_mostly_one_image_and_a_share_of_another() -> None:
    one = {"x": np.zeros((64, 1, 2, 2), np.float32)}
    other = {"x": np.broadcast_to(np.arange(1, 65, dtype=np.float32)[:, None, None, None], (64, 1, 2, 2))}
    found = faded("x", [one, other], np.random.default_rng(0))["x"]
    assert found.dtype == np.float32
    assert (np.ptp(found.reshape(64, -1), axis=1) == 0).all()  # one share for all of an image
    again = np.random.default_rng(0)
    share, mates = again.uniform(0.0, 0.5, size=64), again.permutation(64)
    np.testing.assert_allclose(found[:, 0, 0, 0], share * (mates + 1), rtol=1e-5)
    assert 0.4 < share.max() < 0.5


def test_half_precision_stays_what_it_is() -> None:
    one = {"x": np.ones((4, 1, 2, 2), np.float16)}
    assert faded("x", [one, one], np.random.default_rng(0))["x"].dtype == np.float16


def test_what_differs_in_shape_is_not_blended() -> None:
    one = {"x": np.ones((4, 1, 2, 2), np.float32)}
    assert faded("x", [one, {"x": np.ones((3, 1, 2, 2), np.float32)}], np.random.default_rng(0)) is one


@pytest.mark.parametrize(
    "feed",
    [
        {"x": np.ones((4, 3, 8, 8), np.uint8)},
        {"x": np.ones((4, 8), np.float32)},
        {"x": np.ones((4, 3, 8, 8), np.float32), "mask": np.ones((4, 8), np.int64)},
        {},
    ],
)
def test_only_a_lone_image_of_floating_point_is_one(feed: dict[str, Any]) -> None:
    assert image(feed) is None
    assert image({"x": np.ones((4, 3, 8, 8), np.float32)}) == "x"


def test_held_out_images_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "STEPS", 8)
    before, after, steps = refined(monkeypatch, images())
    assert steps == 32
    assert after.held == before.held == [4, 9]
    assert after.learnt[:8] == before.learnt
    assert len(after.learnt) == 32
    made = np.stack([after.prepared.batches.feeds[k]()["x"] for k in after.learnt[8:]])
    lit = (made[:, :, 0] > 0).reshape(-1, SIDE * SIDE)
    assert set(lit.sum(1)) == {2}  # two images are in each
    assert set(np.flatnonzero(lit.any(0))) == set(before.learnt)
    again = np.stack([after.prepared.batches.feeds[k]()["x"] for k in after.learnt[8:]])
    np.testing.assert_array_equal(made, again)


@pytest.mark.parametrize(("work", "steps"), [(1, 8), (20 * BATCH * 360 * SIDE * SIDE, 20), (10**12, 32)])
def test_steps_are_as_many_as_are_cheap(monkeypatch: pytest.MonkeyPatch, work: int, steps: int) -> None:
    """A sample takes 72 + 288 multiply-accumulates per pixel."""
    monkeypatch.setattr(distill, "STEPS", 8)
    monkeypatch.setattr(distill, "WORK", work)
    assert refined(monkeypatch, images())[2] == steps


def test_nothing_to_blend_takes_no_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "STEPS", 8)
    before, after, steps = refined(monkeypatch, images(2))
    assert after is before  # one batch to learn from, one to judge by
    assert steps == 8


@pytest.mark.parametrize(("refine", "seed"), [("laco,distill", 1), ("distill", 3)])
def test_a_very_narrow_resnet_sees_nearly_as_well_as_the_original(refine: str, seed: int) -> None:
    """With the steps that users get, on images that neither fit nor choice has seen; seeds 0 to 4 give 98 %."""
    found = models.load("digits_resnet")
    choices: dict[str, Any] = {
        "unit_ratio": 0.85,
        "blocks": ("conv", "stream"),
        "check": False,
        "data": found.calibration,
    }
    model = onnxgrail.compress(found.model, dry_run=True, refine=refine, seed=seed, **choices).model
    with np.load(found.heldout) as file, open_session(to_bytes(model)) as session:
        right = (session.run({"images": file["images"]})["logits"].argmax(1) == file["labels"]).mean()
    assert right >= 0.97
