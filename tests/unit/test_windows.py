"""Convolutions whose pads follow from the size of the input are fitted as those that state them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnxgrail
from tests.tiny import tiny

CASES = {
    "same, odd pad at the end": ('auto_pad="SAME_UPPER", strides=[2,2]', "pads=[0,0,1,1], strides=[2,2]"),
    "same, odd pad at the beginning": ('auto_pad="SAME_LOWER", strides=[2,2]', "pads=[1,1,0,0], strides=[2,2]"),
    "valid": ('auto_pad="VALID"', "pads=[0,0,0,0]"),
}


def fitted(attributes: str, sizes: str) -> dict[str, Any]:
    """The weights of a narrowed pair of convolutions, and what the report says of the fits."""
    model = tiny(
        f"float[N,3,{sizes}] x => float[] y",
        f"a = Conv(x, w0)\nb = Relu(a)\ny = Conv<{attributes}>(b, w1)",
        {"w0": (16, 3, 1, 1), "w1": (4, 16, 3, 3)},
    )
    images = np.random.default_rng(0).standard_normal((32, 3, 6, 6)).astype(np.float32)
    result = onnxgrail.compress(model, data={"x": images}, ratio=0.3, compensate="best")
    weights = {v.name: v.const_value.numpy() for v in result.model.graph.initializers.values()}
    return {"weights": weights, "fits": result.report.data["refits"]}


@pytest.mark.parametrize("sizes", ["6,6", "H,W"])
@pytest.mark.parametrize("case", CASES)
def test_pads_that_follow_from_the_size(case: str, sizes: str) -> None:
    implied, stated = (fitted(attributes, sizes) for attributes in CASES[case])
    assert [fit["weight"] for fit in implied["fits"]] == ["w1"]
    assert implied["fits"] == stated["fits"]
    for name, array in stated["weights"].items():
        np.testing.assert_array_equal(implied["weights"][name], array)
