"""Models that give only the labels they chose: they are judged by the scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail.graph.cuts.scored import scored
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import ints, tiny

WEIGHTS: dict[str, Any] = {"w1": (8, 32), "w2": (32, 5), "axes": ints(1), "names": ints(0, 1, 2, 3, 4)}
LAYERS = """
    h = MatMul(x, w1)
    r = Relu(h)
    y = MatMul(r, w2)
"""
WAYS = {
    "plain": ("int64[N] label", "label = ArgMax<axis=1, keepdims=0>(y)"),
    "cast": ("int32[N] label", "a = ArgMax<axis=1, keepdims=1>(y)\n s = Squeeze(a, axes)\n label = Cast<to=6>(s)"),
    "softmax": ("int64[N] label", "p = Softmax<axis=1>(y)\n label = ArgMax<axis=1, keepdims=0>(p)"),
}
WAYS["looked up"] = ("int64[N] label", "a = ArgMax<axis=1, keepdims=0>(y)\n label = Gather(names, a)")
OTHERS = {
    "scores beside it": ("int64[N] label, float[N,5] y", "label = ArgMax<axis=1, keepdims=0>(y)"),
    "no choice": ("int64[N,5] label", "label = Cast<to=7>(y)"),
    "the input": ("int64[N] label, float[N,5] y", "label = ArgMax<axis=1, keepdims=0>(x)"),
}


def model(outputs: str, end: str) -> ir.Model:
    return tiny(f"float[N,8] x => {outputs}", f"{LAYERS}\n{end}", WEIGHTS)


def images(samples: int = 64) -> dict[str, Any]:
    return {"x": np.random.default_rng(0).normal(size=(samples, 8)).astype(np.float32)}


@pytest.mark.parametrize("way", WAYS)
def test_the_scores_are_those_of_the_labels(way: str) -> None:
    given = model(*WAYS[way])
    shown = scored(given)
    assert shown is not None
    labels, scores = (ort.InferenceSession(to_bytes(one)).run(None, images())[0] for one in (given, shown))
    assert scores.shape == (64, 5)
    np.testing.assert_array_equal(scores.argmax(axis=1), labels)
    assert [value.name for value in given.graph.outputs] == ["label"]


@pytest.mark.parametrize("way", OTHERS)
def test_other_outputs_stay(way: str) -> None:
    assert scored(model(*OTHERS[way])) is None


@pytest.mark.parametrize("way", WAYS)
def test_a_search_judges_by_the_scores(way: str) -> None:
    found = onnxgrail.compress(model(*WAYS[way]), data=images(), max_loss=0.5, minimize="params", round_to=1)
    loss = found.report.data["allocation"]["search"]["tried"][0]["loss"]
    assert (loss["output"], loss["kind"], loss["name"]) == ("logits of label", "classes", "total variation")
    assert loss["mean"] > 0
    assert [value.name for value in found.model.graph.outputs] == ["label"]


def test_a_metric_gets_the_labels() -> None:
    def other(reference: dict[str, Any], candidate: dict[str, Any], _: Any) -> Any:
        return (reference["label"] != candidate["label"]).astype(float)

    given = model(*WAYS["plain"])
    onnxgrail.compress(given, data=images(), max_loss=0.9, minimize="params", round_to=1, metric=other)
