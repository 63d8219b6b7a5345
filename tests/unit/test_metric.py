"""A user's metric: the examples of its page on tiny models, and what a wrong function is told."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.metric import Metric, metric_of, outputs_of
from onnxgrail.core import Array, Labels
from onnxgrail.errors import MetricError
from onnxgrail.graph.io.serial import to_bytes
from tests.pages import examples
from tests.reading import read
from tests.tiny import tiny

N = 12
PAGE = Path(__file__).parents[2] / "docs" / "metric.md"
CODE = [block.code for block in examples(PAGE.read_text(encoding="utf-8")) if block.language == "python"]
YOLO, _, CTC, RATE = CODE[1:5]  # the one between is in tests/e2e/test_ultralytics.py
EYE: Array = np.eye(7, dtype=np.float32)
Outputs = dict[str, Array]


def model(output: str, weight: Array = EYE) -> ir.Model:
    """One product: what it is fed is what it gives, if the weight is the identity."""
    return tiny(f"float[N,5,7] x => float[N,5,7] {output}", f"{output} = MatMul(x, w)", {"w": weight})


def run(output: str, x: Array, weight: Array = EYE) -> list[Outputs]:
    session = onnxruntime.InferenceSession(to_bytes(model(output, weight)), providers=["CPUExecutionProvider"])
    return [{output: session.run([output], {"x": part.astype(np.float32)})[0]} for part in np.array_split(x, 3)]


def detections() -> Array:
    """Three boxes per sample that are far apart, one copy of the first, and one box with a low score."""
    boxes = [[10, 10, 8, 8, 0.9], [11, 10, 8, 8, 0.8], [40, 10, 8, 8, 0.9], [70, 10, 8, 8, 0.9], [90, 9, 8, 8, 0.1]]
    rows = np.array([[*box, 1.0, 0.0] for box in boxes], np.float32)
    return np.repeat(rows[None], N, axis=0)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    def write(code: str, name: str = "loss") -> str:
        file = tmp_path / "own.py"
        file.write_text(code, encoding="utf-8")
        return f"{file}:{name}"

    return write


def test_the_example_of_a_detector(written: Callable[[str], str]) -> None:
    metric = metric_of(written(YOLO))
    x = detections()
    reference = run("output", x)
    metric.check(reference)
    x[4, 2, 4] = 0.2  # one of three boxes is lost
    x[7, 3, 0] = 200  # one is elsewhere
    x[9, 1, 4] = 0.0  # the copy, that is suppressed anyway
    seen = metric.losses(reference, run("output", x))
    assert seen.values[[4, 7, 9]] == pytest.approx([1 - 4 / 5, 1 - 4 / 6, 0])
    assert seen.mean == pytest.approx(seen.values.sum() / N)
    assert seen.mean < seen.bound < math.inf
    assert (seen.name, seen.kind) == ("own.py:loss", "metric")
    assert metric.losses(reference, run("output", x, 0.1 * EYE)).mean == 1  # no box has a score any more


def test_the_example_of_a_decoder(written: Callable[[str], str]) -> None:
    metric = metric_of(written(CTC))
    texts = np.array([1, 1, 0, 1, 3])  # reads 1 1 3
    x = np.repeat(EYE[texts][None], N, axis=0)
    reference = run("logits", x)
    metric.check(reference)
    x[2, 4] = EYE[2]  # 1 1 2
    x[5, 2] = EYE[1]  # 1 3
    seen = metric.losses(reference, run("logits", x))
    assert seen.values[[2, 5]] == pytest.approx([1 / 3, 1 / 3])
    assert seen.values.sum() == pytest.approx(2 / 3)


def test_one_number_for_all_samples(written: Callable[[str], str]) -> None:
    metric = metric_of(written(CTC + "\n\n" + RATE).replace(":loss", ":error_rate"))
    x = np.repeat(EYE[[1, 1, 0, 1, 3]][None], N, axis=0)
    reference = run("logits", x)
    metric.check(reference)
    x[2, 4] = EYE[2]
    seen = metric.losses(reference, run("logits", x))
    each = metric_of(written(CTC)).losses(reference, run("logits", x))
    assert seen.mean == pytest.approx(1 / (3 * N))
    np.testing.assert_allclose(seen.values, each.values, atol=1e-12)  # an average: each group adds its own loss
    assert seen.bound == pytest.approx(each.bound)


def result(value: Any) -> Callable[..., Any]:
    return lambda reference, candidate, labels: value(candidate) if callable(value) else value


def nothing_wrong(side: Outputs) -> Array:
    return np.zeros(len(side["y"]))


def falls(side: Outputs) -> Array:
    if (side["y"] == 7).any():
        raise IndexError("no such row")
    return nothing_wrong(side)


def leaves(side: Outputs) -> Array:
    if (side["y"] == 7).any():
        raise SystemExit(3)
    return nothing_wrong(side)


WRONG: dict[str, tuple[Any, str]] = {
    "raises": (falls, "IndexError: no such row (sample 7)"),
    "leaves": (leaves, "SystemExit: 3 (sample 7)"),
    "NaN": (lambda side: np.where(side["y"] == 3, np.nan, 0.0)[:, 0], "NaN (sample 3)"),
    "infinity": (lambda side: np.where(side["y"] == 4, np.inf, 0.0)[:, 0], "infinity (sample 4)"),
    "NaN for all": (math.nan, "NaN (samples 0 to 11)"),
    "nothing": (None, "None, no number"),
    "a text": ("0", "a value of type str, no number"),
    "too few": ([0.0] * 5, "shape [5] for 12 samples"),
    "a table": (np.zeros((N, 1)), "shape [12, 1] for 12 samples"),
    "texts": (["a"] * N, "no number"),
    "of many lengths": ([[0.0], [0.0, 1.0]], "no number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_wrong_function_is_told(case: str) -> None:
    value, words = WRONG[case]
    metric = Metric(name="own.py:loss", function=result(value))
    feeds = [{"y": part} for part in np.array_split(np.arange(N, dtype=np.float32)[:, None], 3)]
    with pytest.raises(MetricError) as caught:
        metric.losses(feeds, feeds)
    assert "own.py:loss" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("value", "words"), [([0.0] * 3 + [0.5] * 9, "0.5 for sample 3"), (0.25, "for all samples")])
def test_the_original_against_itself(value: Any, words: str) -> None:
    feeds = [{"y": np.zeros((N, 1))}]
    with pytest.raises(MetricError, match=f"own.py:loss returned .*{words}.* expected 0"):
        Metric(name="own.py:loss", function=result(value)).check(feeds)


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("x = 1", "loss", "defines no 'loss'"),
        ("loss = 1", "loss", "expected a function"),
        ("def loss(reference, candidate): pass", "loss", "three arguments"),
        ("raise ValueError('at once')", "loss", "at once"),
    ],
)
def test_what_is_not_a_metric(code: str, name: str, words: str, written: Callable[[str], str]) -> None:
    with pytest.raises(MetricError, match=words):
        metric_of(written(code))


@pytest.mark.parametrize("text", ["loss", "nowhere.py:loss"])
def test_files_that_are_not_there(text: str) -> None:
    with pytest.raises(MetricError, match=re.escape("file.py:function")):
        metric_of(text)


def test_labels_and_arguments_that_are_written_to() -> None:
    def worse(reference: Outputs, candidate: Outputs, labels: Array | None) -> Array:
        assert labels is not None
        right = [side["y"].argmax(axis=1) == labels for side in (reference, candidate)]
        reference["y"][:] = 0
        return right[0].astype(float) - right[1]

    a, b = EYE[[0, 1, 2, 3]], EYE[[0, 1, 2, 4]]
    labels = [Labels(values=np.array(part)) for part in ([0, 1], [2, 3])]
    sides = [[{"y": side[:2].copy()}, {"y": side[2:].copy()}] for side in (a, b)]
    metric = metric_of(worse)
    metric.check(sides[0], labels)
    np.testing.assert_array_equal(metric.losses(*sides, labels).values, [0, 0, 0, 1])
    np.testing.assert_array_equal(sides[0][0]["y"], a[:2])


def test_outputs_of_other_sizes_are_judged_feed_by_feed() -> None:
    metric = metric_of(lambda reference, candidate, labels: np.abs(reference["y"] - candidate["y"]).max(axis=1))
    a = [{"y": np.zeros((2, 3))}, {"y": np.zeros((2, 5))}]
    b = [{"y": np.zeros((2, 3))}, {"y": np.ones((2, 5))}]
    np.testing.assert_array_equal(metric.losses(a, b).values, [0, 0, 1, 1])


def test_all_rows_of_a_single_sample_are_judged_as_one() -> None:
    """Two images with two boxes and one: the third box is no third image."""
    seen = []

    def missed(reference: Outputs, candidate: Outputs, labels: Array | None) -> list[float]:
        seen.append(len(reference["boxes"]))
        return [float(len(reference["boxes"]) != len(candidate["boxes"]))]

    a = [{"boxes": np.zeros((count, 4))} for count in (2, 1)]
    b = [{"boxes": np.zeros((count, 4))} for count in (1, 1)]
    metric = metric_of(missed)
    metric.check(a, alone=[True, True])
    found = metric.losses(a, b, alone=[True, True])
    np.testing.assert_array_equal(found.values, [1, 0])
    assert found.agreement.samples == 2
    assert seen == [2, 1] * 2
    with pytest.raises(MetricError, match=r"shape \[1\] for 3 samples"):
        metric.check(a)


def test_models_are_run_on_batches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("WEIGHT = 2.0\n", encoding="utf-8")
    file = tmp_path / "own.py"
    file.write_text(
        "def loss(reference, candidate, labels):\n"
        "    import near\n"
        "    print('called')\n"
        "    return near.WEIGHT * abs(reference['y'] - candidate['y']).max(axis=(1, 2))\n",
        encoding="utf-8",
    )
    x = np.ones((N, 5, 7), np.float32)
    batches = read({"x": x}, signature_of(model("y")), batch_size=5)
    a, b = (outputs_of(to_bytes(model("y", weight)), batches) for weight in (EYE, 0.5 * EYE))
    assert [len(one["y"]) for one in a] == [5, 5, 2]
    np.testing.assert_allclose(metric_of(f"{file}:loss").losses(a, b).values, np.ones(N))
    assert capsys.readouterr().out == ""
