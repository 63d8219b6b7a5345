"""The embedded image model, quantised to eight bits before it is compressed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import onnxgrail
from onnxgrail import models
from onnxgrail.core import Refusal
from onnxgrail.narrowing import decide, ready

DIGITS = models.load("digits_resnet")


class Images(CalibrationDataReader):
    """The model's own calibration images in a few batches."""

    def __init__(self) -> None:
        with np.load(DIGITS.calibration) as archive:
            self._batches = iter(np.split(archive["images"], 8))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"images": batch}


def accuracy(path: Path, *, optimise: bool = True) -> float:
    options = ort.SessionOptions()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return models.score(DIGITS, lambda feed: session.run(None, feed))


def quantised(folder: Path, **choices: Any) -> Path:
    target = folder / "int8.onnx"
    choices = {"per_channel": True, "weight_type": QuantType.QInt8, "activation_type": QuantType.QUInt8, **choices}
    quantize_static(str(DIGITS.model), str(target), Images(), quant_format=QuantFormat.QDQ, **choices)
    return target


def halved(source: Path, target: Path, **choices: Any) -> dict[str, Any]:
    result = onnxgrail.compress(source, target, data=DIGITS.calibration, unit_ratio=0.5, blocks=("conv",), **choices)
    return result.report.data


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised(tmp_path_factory.mktemp("quantised"))


@pytest.fixture(scope="module")
def slim(wide: Path) -> tuple[Path, dict[str, Any]]:
    target = wide.with_name("slim.onnx")
    return target, halved(wide, target)


def test_the_same_blocks_are_found_as_in_the_float_model(wide: Path) -> None:
    found = [onnxgrail.inspect(model).blocks for model in (DIGITS.model, wide)]
    blocks = [[(b["kind"], b["units"]) for b in some if b["kind"] != "rank"] for some in found]  # int8 stays one layer
    assert Counter(blocks[0]) == Counter(blocks[1])


def test_it_is_as_good_as_the_float_model_compressed(slim: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, report = slim
    halved(Path(DIGITS.model), tmp_path / "float.onnx")
    assert [b["kept"] for b in report["blocks"] if b["kind"] == "conv"] == [16, 32, 48]
    assert accuracy(path) > accuracy(tmp_path / "float.onnx") - 0.03


def test_fused_kernels_agree(slim: tuple[Path, dict[str, Any]]) -> None:
    assert accuracy(slim[0]) == pytest.approx(accuracy(slim[0], optimise=False), abs=0.01)


def test_weights_stay_integers(wide: Path, slim: tuple[Path, dict[str, Any]]) -> None:
    kinds = [Counter(t.data_type for t in onnx.load(path).graph.initializer) for path in (wide, slim[0])]
    ops = [Counter(n.op_type for n in onnx.load(path).graph.node) for path in (wide, slim[0])]
    assert kinds[0] == kinds[1]
    assert ops[0] == ops[1]
    assert slim[0].stat().st_size < 0.65 * wide.stat().st_size


def test_compensated_weights_out_of_range_grow_their_scale(wide: Path, slim: tuple[Path, dict[str, Any]]) -> None:
    """Clamping them instead costs a tenth of the accuracy."""
    before, after = (
        {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer} for p in (wide, slim[0])
    )
    grew = [
        n
        for n in after
        if n.endswith("weight_scale") and after[n].size == before[n].size and (after[n] > before[n]).any()
    ]
    assert len(grew) >= 3
    assert accuracy(slim[0]) > 0.9


@pytest.mark.parametrize(
    "choices",
    [
        {"per_channel": False},
        {"weight_type": QuantType.QUInt8},
        {"reduce_range": True},
        {"extra_options": {"QuantizeBias": False}},
    ],
    ids=["per-tensor", "unsigned", "reduced", "float-bias"],
)
def test_other_ways_to_quantise(choices: dict[str, Any], tmp_path: Path) -> None:
    path = quantised(tmp_path, **choices)
    halved(path, tmp_path / "slim.onnx")
    assert accuracy(tmp_path / "slim.onnx") > 0.85
    assert accuracy(tmp_path / "slim.onnx") == pytest.approx(accuracy(tmp_path / "slim.onnx", optimise=False), abs=0.01)


def test_blocks_that_tip_a_rounding_over_are_taken_back(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compensation the promise is exactness, and rounded activations can turn a last digit into a step."""
    real, asked = decide.proved, []

    def proof(prepared: Any, job: Any, blocks: Any, widths: Any, dead: Any = None, **options: Any) -> Any:
        asked.append(None if dead is None else int(dead.sum()))
        good, refusals = real(prepared, job, blocks, widths, dead, **options)
        return (good, refusals) if dead is None else (good[1:], (Refusal(value="w", node="n", op="", reason="a step"),))

    monkeypatch.setattr(ready, "proved", proof)
    monkeypatch.setattr(decide, "proved", proof)
    report = halved(wide, tmp_path / "slim.onnx", compensate="none", selector="l2", check=False)
    narrowed = [b for b in report["blocks"] if b["kept"] < b["units"]]
    assert asked[0] is None
    assert asked[1] > sum(b["units"] - b["kept"] for b in report["blocks"]) > 0
    assert [r["reason"] for r in report["refusals"]][-1] == "a step"
    assert len(narrowed) == sum(b["kind"] == "conv" for b in report["blocks"]) - 1
