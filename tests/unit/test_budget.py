"""Targets that users write, in numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.machine.amounts import METRICS, Metric, parse, target_of
from onnxgrail.recipe.check import recipe_of


@pytest.mark.parametrize(
    ("metric", "text", "limit"),
    [
        ("params", "60%", 600.0),
        ("params", " 12.5 % ", 125.0),
        ("macs", "100%", 1000.0),
        ("latency", "60%", 600.0),
        ("params", "500", 500.0),
        ("params", "500M", 5e8),
        ("params", "7b", 7e9),
        ("params", "1e6", 1e6),
        ("macs", "1.2G", 1.2e9),
        ("macs", "3k", 3e3),
        ("macs", "2T", 2e12),
        ("size", "25MB", 25e6),
        ("size", "25 MiB", 25 * 2.0**20),
        ("size", "3kB", 3e3),
        ("size", "800", 800.0),
        ("size", "1GB", 1e9),
        ("latency", "8ms", 8.0),
        ("latency", "0.5s", 500.0),
        ("latency", "250us", 0.25),
        ("latency", "250µs", 0.25),  # micro sign
        ("latency", "250μs", 0.25),  # Greek mu
    ],
)
def test_amounts(metric: Metric, text: str, limit: float) -> None:
    assert parse(metric, text).limit(1000.0) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("metric", "text", "why"),
    [
        ("params", "", "not a positive amount"),
        ("params", "many", "not a positive amount"),
        ("params", "-5M", "not a positive amount"),
        ("params", "0", "not a positive amount"),
        ("params", "0%", "not a positive amount"),
        ("params", "1.2.3M", "not a positive amount"),
        ("params", "nan", "not a positive amount"),
        ("params", "1e999", "not a positive amount"),
        ("params", "101%", "more than all"),
        ("params", "0.6", "less than one. For a share write 60%"),
        ("params", "5ms", "no unit of"),
        ("macs", "5MB", "no unit of"),
        ("size", "5M", "no unit of"),
        ("latency", "8", "no unit of"),
        ("latency", "8min", "no unit of"),
    ],
)
def test_what_is_no_amount_is_named(metric: Metric, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"--target-{metric}") as caught:
        parse(metric, text)
    assert why in str(caught.value)


@given(st.sampled_from(METRICS), st.text(max_size=8))
def test_any_text_is_an_amount_or_a_usage_error(metric: Metric, text: str) -> None:
    try:
        limit = parse(metric, text).limit(1000.0)
    except UsageError:
        return  # anything else would be a traceback
    assert limit > 0


def test_a_recipe_has_a_ratio_or_one_target() -> None:
    assert target_of(recipe_of({})) is None
    assert recipe_of({"ratio": 0.5}).ratio == 0.5
    for value, text in ((500_000, "500000"), (500_000.0, "500000"), ("60%", "60%")):
        recipe = recipe_of({"target_params": value})
        assert (recipe.ratio, recipe.target_params) == (None, text)
    target = target_of(Recipe(ratio=None, target_size="25MB"))
    assert target is not None
    assert (target.metric, target.option) == ("size", "--target-size")
    with pytest.raises(UsageError, match="--ratio and --target-macs exclude each other"):
        recipe_of({"ratio": 0.3, "target_macs": "60%"})
    with pytest.raises(UsageError, match="--target-params and --target-latency exclude each other"):
        recipe_of({"target_latency": "8ms", "target_params": "60%"})
    with pytest.raises(UsageError, match="allocate has no 'foo'"):
        recipe_of({"allocate": "foo"})
