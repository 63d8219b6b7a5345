"""Images that a model changes a little: the changes are judged."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

import onnxgrail
from onnxgrail.core import Array, Feed
from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.changes import Base, bases_of
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.loss import losses_of
from tests.tiny import tiny


def images(count: int = 4, side: int = 16, *, channels: int = 3, seed: int = 1) -> Array:
    """Smooth images in 0..1."""
    noise = np.random.default_rng(seed).normal(size=(count, channels, side, side))
    smooth = gaussian_filter(noise, (0, 0, 3, 3))
    return ((smooth - smooth.min()) / np.ptp(smooth)).astype(np.float32)


def base_of(output: object, feed: Feed) -> Base | None:
    """The input that an output resembles."""
    return bases_of([(feed, {"y": output})]).get("y")


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("axis", [1, 3])
def test_an_input_is_found_with_its_gain_and_offset(times: int, axis: int) -> None:
    given = np.moveaxis(images(), 1, axis)
    sides = [a for a in (1, 2, 3) if a != axis]
    output = given.repeat(times, sides[0]).repeat(times, sides[1]) * 255 - 20
    output += np.random.default_rng(4).uniform(-5e-3, 5e-3, output.shape)
    base = base_of(output, {"other": np.zeros((4, 2), np.float32), "x": given})
    assert base is not None
    assert (base.name, base.axis, base.times) == ("x", axis, times)
    near = base.of({"x": given})
    assert near.shape == output.shape
    assert np.square(near - output).mean() < 0.02 * output.var()
    if times == 1:
        np.testing.assert_allclose(near, output, rtol=1e-4, atol=1e-2)


def test_other_outputs_have_no_such_input() -> None:
    given = {"x": images()}
    rng = np.random.default_rng(2)
    assert base_of(rng.normal(size=(4, 3, 16, 16)), given) is None  # of another content
    assert base_of(images(channels=2), given) is None
    assert base_of(images()[:, :, :12], given) is None
    assert base_of(images().reshape(4, -1), given) is None
    assert base_of([1, 2], given) is None
    assert base_of(np.full((4, 3, 16, 16), np.nan), given) is None


def test_all_feeds_tell_how_much_a_model_changes() -> None:
    given = [images(seed=seed) for seed in range(4)]
    noise = np.random.default_rng(3).normal(size=given[0].shape)
    much, little = (0.6 * given[0].std() * noise, 0.1 * given[0].std() * noise)
    outputs = [x + (much if number == 0 else little) for number, x in enumerate(given)]
    pairs = [({"x": x}, {"y": y}) for x, y in zip(given, outputs, strict=True)]
    assert bases_of(pairs[:1]) == {}
    for some in (pairs, pairs[::-1]):
        base = bases_of(some)["y"]
        np.testing.assert_allclose(base.gain, 1, atol=0.1)


def test_series_of_other_lengths_are_no_changes_of_an_input() -> None:
    pairs = [({"x": x}, {"y": 1.01 * x}) for x in (np.ones((4, 30)), np.ones((4, 40)))]
    assert bases_of(pairs) == {}


@pytest.mark.parametrize("shape", [(200, 4), (200, 32), (200, 12, 3), (50, 2, 8, 8), (20, 1, 6, 6, 6)])
def test_the_next_state_of_a_simulation_is_judged_by_what_changes(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    state, change = rng.normal(size=shape).astype(np.float32), 0.1 * rng.normal(size=shape)
    base = base_of(state + change, {"state": state})
    assert base is not None
    np.testing.assert_array_equal(base.of({"state": state}), state)
    assert base_of(state + 9 * change, {"state": state}) is None


def test_a_copy_of_the_input_is_far_from_what_a_model_makes_of_it() -> None:
    """The error is all that the model changes, which is little of the image."""
    body = "c = Conv <pads=[1,1,1,1]> (x, w)\ns = Mul(c, small)\ny = Add(x, s)"
    weights = {"w": (3, 3, 3, 3), "small": np.array([0.01], np.float32)}
    models = [tiny("float[N,3,16,16] x => float[N,3,16,16] y", body, weights)]
    models.append(tiny("float[N,3,16,16] x => float[N,3,16,16] y", "y = Identity(x)", {}))
    found = onnxgrail.compare(*models, data={"x": images(16)}).outputs[0]
    (verdict,) = found.verdicts
    assert verdict.measure == "NMSE of what the model changes"
    assert verdict.value is not None
    assert verdict.value > 0.9
    assert found.nmse is not None
    assert found.nmse < 0.01


def test_a_state_is_no_image() -> None:
    """Also where it has the shape of one, and keeps most of what it was."""
    body = """
        c = Conv <pads=[1,1,1,1]> (x, w)
        s = ReduceMean <axes=[1], keepdims=1> (c)
        t = Mul(s, small)
        cache_out = Add(cache, t)
        y = Relu(c)
    """
    graph = "float[1,3,16,16] x, float[2,1,16,16] cache => float[1,3,16,16] y, float[2,1,16,16] cache_out"
    one, two = (
        tiny(graph, body, {"w": (3, 3, 3, 3), "small": np.array([size], np.float32)}, opset=13) for size in (0.1, 0.11)
    )
    feeds = [{"x": x[None], "cache": x[:2, None]} for x in images(8)]
    found = {one.name: one.verdicts for one in onnxgrail.compare(one, two, data=feeds).outputs}
    assert [verdict.kind for verdict in found["cache_out"]] == ["state"]


def test_each_number_of_a_state_changes_by_its_own_units() -> None:
    """A position in metres and an angle, and a step of a simulation that forgets to turn."""
    rng = np.random.default_rng(6)
    units = np.array([100.0, 100.0, 0.3])
    state = (units * rng.normal(size=(64, 3))).astype(np.float32)
    step = 0.02 * units * rng.normal(size=(64, 3))
    feed, after = {"state": state}, state + step
    base = base_of(after, feed)
    assert base is not None
    assert base.units is not None
    tally = Tally(Clues(changes={"y": base.units}))
    wrong = after - step * [0, 0, 1]
    tally.add({"y": after}, {"y": wrong}, bases={"y": base.of(feed)})
    (loss,) = losses_of(tally)
    assert tally.known["y"][0].changes
    assert loss.mean > 0.05
