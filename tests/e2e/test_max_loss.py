"""`max_loss`: what is written loses no more, refusals say what the cheapest step would cost, killed searches go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxgrail
from onnxgrail.allocation.measures import measure_of
from onnxgrail.calibration import prepare as preparing
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.core import Outcome
from onnxgrail.errors import DataError, MetricError, NothingToCompressError, UsageError
from onnxgrail.finishing import empty
from onnxgrail.machine.progress import Progress
from onnxgrail.methods.refine.refinement import Refined, Refinement
from onnxgrail.narrowing import widths
from onnxgrail.registry import REFINEMENTS
from onnxgrail.search import within as searching
from tests.judging import killed, recorded
from tests.tiny import ints, tiny

RNG = np.random.default_rng(5)
WIDTH, KEPT = 48, 16


def planted(path: Path) -> Path:
    """Save an MLP with classes whose 48 neurons are 16, three times each."""
    first = RNG.standard_normal((12, KEPT)).astype(np.float32)
    second = RNG.standard_normal((WIDTH, 4)).astype(np.float32)
    second -= second.mean(axis=1, keepdims=True)  # a softmax does not see it
    weights = {"w1": np.tile(first, 3), "w2": second / 3}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="up"),
        helper.make_node("Relu", ["h"], ["a"], name="act"),
        helper.make_node("MatMul", ["a", "w2"], ["logits"], name="down"),
    ]
    graph = helper.make_graph(
        nodes,
        "planted",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 12])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def inputs(count: int, seed: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).standard_normal((count, 12)).astype(np.float32)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("planted") / "m.onnx")


def compressed(model: Path, target: Path, **choices: Any) -> dict[str, Any]:
    choices = {"data": inputs(96), "max_loss": "1%", "minimize": "params", "selector": "obs", **choices}
    found: dict[str, Any] = onnxgrail.compress(model, target, force=True, **choices).report.data
    return found


@pytest.mark.parametrize(("samples", "crossed"), [(96, True), (400, False)])
def test_planted_redundancy_goes_within_any_loss(model: Path, tmp_path: Path, samples: int, crossed: bool) -> None:
    """Two thirds of the neurons are copies, which cost nothing; the others cost much."""
    data = compressed(model, tmp_path / "o.onnx", data=inputs(samples), round_to=1)
    (block,), search = data["blocks"], data["allocation"]["search"]
    assert KEPT <= block["kept"] <= KEPT + 3
    assert search["crossed"] is crossed
    loss = search["tried"][search["chosen"]]["loss"]
    assert loss["mean"] <= loss["bound"] <= 0.01
    assert loss["samples"] == (96 if crossed else 80)
    compared = onnxgrail.compare(model, tmp_path / "o.onnx", data=inputs(2000, seed=1))
    assert compared.outputs[0].verdicts[0].loss <= 0.01
    assert "\nFidelity: top-1 agreement" in repr(compared)


def test_held_out_data_judge_if_they_are_given(model: Path, tmp_path: Path) -> None:
    data = compressed(model, tmp_path / "o.onnx", held_out=inputs(40, seed=3))
    search = data["allocation"]["search"]
    assert (search["crossed"], search["tried"][0]["loss"]["samples"]) == (False, 40)


def test_nothing_within_the_loss_is_a_refusal_with_its_price(tmp_path: Path) -> None:
    path = tmp_path / "dense.onnx"
    net = onnx.load(planted(path))
    dense = np.random.default_rng(0).standard_normal((12, WIDTH)).astype(np.float32)
    net.graph.initializer[0].CopyFrom(numpy_helper.from_array(dense, "w1"))
    onnx.save(net, path)
    with pytest.raises(
        NothingToCompressError, match=r"can go within --max-loss 0\.001%: the cheapest step, "
    ) as caught:
        compressed(path, tmp_path / "o.onnx", max_loss=1e-5)
    assert "--quantize int8" in caught.value.hint
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("amount", [{"max_loss": 1e-9}, {"ratio": 0.5, "include": "nothing"}])
def test_a_refusal_says_how_to_quantize_alone(amount: dict[str, Any], model: Path, tmp_path: Path) -> None:
    target, data = tmp_path / "o.onnx", inputs(96)
    with pytest.raises(NothingToCompressError) as caught:
        onnxgrail.compress(model, target, data=data, quantize="int8-weights", selector="random", **amount)
    assert "--ratio 0 --quantize int8-weights quantizes without narrowing" in str(caught.value.hint)
    onnxgrail.compress(model, target, data=data, quantize="int8-weights", ratio=0)
    assert target.stat().st_size < model.stat().st_size


def test_a_larger_loss_gives_a_smaller_model(tmp_path: Path) -> None:
    path = tmp_path / "dense.onnx"
    net = onnx.load(planted(path))
    dense = np.random.default_rng(0).standard_normal((12, WIDTH)).astype(np.float32)
    net.graph.initializer[0].CopyFrom(numpy_helper.from_array(dense, "w1"))
    onnx.save(net, path)
    kept = [compressed(path, tmp_path / "o.onnx", max_loss=loss)["blocks"][0]["kept"] for loss in (0.05, 0.1, 0.2)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) > 1


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"ratio": 0.2}, "--max-loss and --ratio exclude each other"),
        ({"unit_ratio": 0.2}, "--max-loss and --unit-ratio exclude each other"),
        ({"target_params": "50%"}, "--max-loss and --target-params exclude each other"),
        ({"max_loss": 0}, "max_loss must be above 0"),
        ({"max_loss": "100%"}, "max_loss must be above 0 and below 1"),
        ({"max_loss": 5}, "and below 1, got 5. For 5 percent write 5%"),
        ({"max_loss": "nan%"}, "max_loss must be above 0"),
        ({"max_loss": -0.1}, "max_loss must be above 0"),
        ({"max_loss": "much"}, "max_loss is 'much'"),
        ({"minimize": "joy"}, "minimize has no 'joy'"),
        ({"data": None}, r"--max-loss 1% \(the default\) needs --data: without data no loss can be measured"),
        ({"data": None, "max_loss": 0.02}, "--max-loss 2% needs --data"),
        ({"allocate": "global"}, "--allocate global distributes a given amount, and --max-loss has none"),
        ({"method": "grasp"}, "--max-loss needs --method grail"),
    ],
)
def test_contradictions_are_usage_errors(model: Path, tmp_path: Path, choices: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        compressed(model, tmp_path / "o.onnx", **choices)
    assert list(tmp_path.iterdir()) == []


def test_few_samples_run_and_the_bound_is_said_to_be_loose(model: Path, tmp_path: Path) -> None:
    data = compressed(model, tmp_path / "o.onnx", data=inputs(12), batch_size=4, max_loss=0.9)
    assert any("only 12 samples judge the loss" in note for note in data["notes"])


def test_samples_of_one_batch_are_split(model: Path, tmp_path: Path) -> None:
    data = compressed(model, tmp_path / "o.onnx", data=inputs(6), max_loss=0.9)
    assert any("only 6 samples judge the loss" in note for note in data["notes"])


def test_a_single_sample_leaves_none_to_judge(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a single batch \(1 sample\): none is left to judge the loss"):
        compressed(model, tmp_path / "o.onnx", data=inputs(1))


def test_that_is_said_before_anything_is_traced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "surveyed", lambda *_, **__: pytest.fail("the model is traced"))
    with pytest.raises(DataError, match="a single batch"):
        onnxgrail.compress(model, data=inputs(1))


def test_a_killed_search_goes_on_to_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compressed(model, tmp_path / "whole.onnx", round_to=1)["allocation"]["search"]
    with killed(monkeypatch, 6):
        compressed(model, tmp_path / "o.onnx", round_to=1, resume=tmp_path / "folder")
    again = recorded(monkeypatch)
    search = compressed(model, tmp_path / "o.onnx", round_to=1, resume=tmp_path / "folder")["allocation"]["search"]
    assert search == whole
    assert 1 not in again  # no block is tried again
    assert (tmp_path / "o.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()


def test_a_search_ends_when_its_time_is_over(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10**6, 100))
    monkeypatch.setattr(searching.time, "monotonic", lambda: float(next(ticks)))
    search = compressed(model, tmp_path / "o.onnx", budget_seconds=5, round_to=1)["allocation"]["search"]
    assert search["chosen"] == len(search["tried"]) - 1


def flips(reference: Any, candidate: Any, labels: Any) -> Any:
    """Share of samples with another class."""
    return reference["logits"].argmax(axis=1) != candidate["logits"].argmax(axis=1)


def test_a_metric_of_the_user_judges(model: Path, tmp_path: Path) -> None:
    data = compressed(model, tmp_path / "o.onnx", metric=flips, max_loss=0.1, round_to=1)
    loss = data["allocation"]["search"]["tried"][-1]["loss"]
    assert (loss["name"], loss["kind"], loss["samples"]) == ("flips", "metric", 96)
    assert data["blocks"][0]["kept"] < WIDTH


def test_a_metric_that_sees_no_loss_is_told(model: Path, tmp_path: Path) -> None:
    def blind(reference: Any, _candidate: Any, _labels: Any) -> Any:
        return np.zeros(len(next(iter(reference.values()))))

    data = compressed(model, tmp_path / "o.onnx", metric=blind, max_loss=0.1)
    assert any("is 0 on all" in note and "can lose something" in note for note in data["notes"])


@pytest.mark.parametrize(
    ("metric", "choices", "error", "text"),
    [
        (lambda a, b, labels: 1 / 0, {}, MetricError, "<lambda> raised ZeroDivisionError"),
        (lambda a, b, labels: float("nan"), {}, MetricError, "<lambda> returned NaN"),
        (lambda a, b, labels: "good", {}, MetricError, "no number"),
        (lambda a, b, labels: 0.5, {}, MetricError, "of the original against itself, expected 0"),
        (lambda a, b: 0.0, {}, MetricError, "cannot be called with three arguments"),
        (flips, {"max_loss": None, "ratio": 0.2}, UsageError, "--metric needs --max-loss"),
    ],
)
def test_metrics_that_cannot_judge(
    model: Path, tmp_path: Path, metric: Any, choices: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        compressed(model, tmp_path / "o.onnx", metric=metric, **choices)
    assert list(tmp_path.iterdir()) == []


def test_a_slower_result_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(median=2.0, mean=2.0, p90=2.0, p99=2.0, spread=0.1, ratio=0.5, interval=(0.4, 0.6))
    monkeypatch.setattr(empty, "slower", lambda *_: times)
    monkeypatch.setattr(widths, "latency_of", lambda prepared, *_: (measure_of(prepared, "macs"), ""))
    with pytest.raises(NothingToCompressError, match=r"would take 2\.00 times as long as the input; nothing is"):
        compressed(model, tmp_path / "o.onnx", minimize="latency")
    assert not (tmp_path / "o.onnx").exists()


def test_the_recipe_of_the_model_repeats_the_search(model: Path, tmp_path: Path) -> None:
    data = compressed(model, tmp_path / "o.onnx", save_recipe=tmp_path / "r.json")
    recipe = json.loads((tmp_path / "r.json").read_text())
    assert (recipe["max_loss"], recipe["ratio"], recipe["minimize"]) == (0.01, None, "params")
    again = onnxgrail.apply(tmp_path / "r.json", model, tmp_path / "p.onnx", data=inputs(96))
    assert again.report.data["allocation"]["search"] == data["allocation"]["search"]


@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_a_refinement_that_breaks_the_limit_is_taken_back(
    model: Path, tmp_path: Path, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(job: Refinement, _: Progress) -> tuple[Refined, ...]:
        for name, value in job.slim.graph.initializers.items():
            assert value.const_value is not None
            job.write({name: scale * value.const_value.numpy()})
        return (Refined(block="model", kind="laco", before=0.5, after=0.1, epochs=1, seconds=0.0, outcome=Outcome()),)

    monkeypatch.setitem(REFINEMENTS, "laco", scaled)
    for place in ("methods.require_torch", "methods.refine.steps.require_torch"):
        monkeypatch.setattr(f"onnxgrail.{place}", lambda recipe: None)
    report = compressed(model, tmp_path / "r.onnx", refine="laco", held_out=32, data=inputs(160))
    (entry,) = report["refines"]
    assert any("the loss was measured before --refine laco;" in note for note in report["notes"])
    file = onnx.load(tmp_path / "r.onnx")
    whole = max(abs(numpy_helper.to_array(array)).max() for array in file.graph.initializer)
    assert (entry["after"] == entry["before"]) == (scale < 1)
    assert ("taken back" in entry["outcome"]["reason"]) == (scale < 1)
    assert whole > 1  # a fifth of the weights would be below


def test_all_candidates_are_judged_by_what_the_output_holds_in_all_samples() -> None:
    """The samples of even numbers, which judge one half of the fits, are of one class and show one pattern."""
    rng = np.random.default_rng(0)
    classes = np.where(np.arange(96) % 2, rng.integers(0, 4, 96), 0)
    data = {"x": (3 * np.eye(4)[classes] + 0.5 * rng.standard_normal((96, 4))).astype(np.float32)}
    same = np.eye(4, dtype=np.float32)
    weights = {"w": np.hstack([same, -same]), "v": np.vstack([same, -same])}
    model = tiny("float[N,4] x => float[N,4] y", "a = MatMul(x, w)\nb = Relu(a)\ny = MatMul(b, v)", weights)
    choices = {"max_loss": 0.9, "batch_size": 1, "round_to": 1, "minimize": "params"}
    report = onnxgrail.compress(model, data=data, **choices).report.data
    assert {one["loss"]["kind"] for one in report["allocation"]["search"]["tried"]} == {"classes"}


def test_a_stream_whose_matrix_takes_more_bytes_than_go_stays() -> None:
    """One matrix, on the mean of all tokens, costs few multiply-accumulates."""
    body, shapes = "x0 = MatMul(x, into)", {"into": (6, 16), "head": (16, 5)}
    for i in range(2):
        body += f"""
            y{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> (x{i}, g{i})
            h{i} = MatMul(y{i}, up{i})
            r{i} = Relu(h{i})
            d{i} = MatMul(r{i}, down{i})
            x{i + 1} = Add(x{i}, d{i})"""
        shapes |= {f"up{i}": (16, 4), f"down{i}": (4, 16), f"g{i}": (16,)}
    body += "\nm = ReduceMean <keepdims=0> (x2, one)\nt = Tanh(m)\nz = MatMul(t, head)\ny = Softmax(z)"
    model = tiny("float[N,16,6] x => float[] y", body, {**shapes, "one": ints(1)})
    data = {"x": np.random.default_rng(0).normal(size=(128, 16, 6)).astype(np.float32)}
    result = onnxgrail.compress(model, data=data, max_loss=0.01, minimize="macs", round_to=1)
    found = result.report.data["model"]
    assert found["params_after"] < found["params_before"]
