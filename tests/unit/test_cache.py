"""The cache of activations gives back what was put in, and holds no more memory than it may."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.stream.cache import SMALL, Cache
from onnxgrail.errors import UsageError
from onnxgrail.machine.amounts import cache_bytes
from onnxgrail.recipe.check import recipe_of
from tests.pages import small

RNG = np.random.default_rng(0)


def batch(**counts: int) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=(count, 256)).astype(np.float32) for name, count in counts.items()}


def test_arrays_come_back_from_files_as_they_were() -> None:
    first, second = batch(x=300, y=100), batch(x=200, y=128)
    cache = Cache([first, second], budget=0)
    assert cache.held == 0
    for got, want in zip(cache, [first, second], strict=True):
        assert got.keys() == want.keys()
        for name, array in want.items():
            assert isinstance(got[name], np.memmap)
            np.testing.assert_array_equal(got[name], array)


def test_memory_is_used_up_to_the_budget_and_given_back() -> None:
    feeds = [batch(x=256, y=256) for _ in range(4)]
    one = feeds[0]["x"].nbytes
    cache = Cache(feeds, budget=3 * one)
    assert cache.held == 3 * one
    cache.keep({"y"})
    assert (cache.names, cache.held) == (["y"], one)
    cache.add(1, {"z": feeds[1]["x"]})
    assert cache.held == 2 * one
    for number, got in enumerate(cache):
        np.testing.assert_array_equal(got["y"], feeds[number]["y"])
    cache.clear()
    assert (cache.held, len(cache), cache.names) == (0, 0, [])


def test_small_text_and_narrow_types() -> None:
    odd = {
        "text": np.array([["a", "b"]], dtype=object),
        "scalar": np.array(3.0),
        "half": RNG.normal(size=(SMALL,)).astype(ml_dtypes.bfloat16),
        "strided": RNG.normal(size=(SMALL, 2))[:, 0],
        "empty": np.zeros((0, 3)),
    }
    (got,) = Cache([odd], budget=0)
    assert {n for n, a in got.items() if isinstance(a, np.memmap)} == {"half", "strided"}
    for name, array in odd.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype


def test_a_budget_changes_no_number() -> None:
    entry, model = models.load("digits_resnet"), small("digits_resnet")
    made = []
    for budget in ("1G", 0):
        result = onnxgrail.compress(
            model, dry_run=True, data=entry.calibration, samples=64, check=False, cache_budget=budget, ratio=0.3
        )
        made.append([(n, v.const_value.tobytes()) for n, v in result.model.graph.initializers.items()])
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("text", "count"),
    [("512M", 2**29), ("2g", 2**31), ("1.5GiB", 3 * 2**29), ("64MB", 64e6), (1000, 1000), ("0", 0)],
)
def test_sizes(text: str | int, count: int) -> None:
    assert cache_bytes(recipe_of({"cache_budget": text})) == count


@pytest.mark.parametrize("text", ["much", "12parsecs", "-1", "", "9" * 400])
def test_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"--cache-budget.*512M"):
        recipe_of({"cache_budget": text})
