"""Runs in which convolutions become two with fewer channels between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import KINDS, Array, Kind
from tests.oracle import run
from tests.tiny import numbers, tiny

CHANNELS, RANK = 48, 12
OTHERS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "rank")


@pytest.fixture(scope="module")
def images() -> dict[str, Array]:
    """Calibration data."""
    return {"x": np.random.default_rng(3).normal(size=(64, 8, 6, 6)).astype(np.float32)}


def planted() -> ir.Model:
    """A model whose middle convolution reads few directions of its channels, all of which another layer reads too."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(RANK, CHANNELS)) / np.sqrt(CHANNELS)
    low = np.einsum("orkl,rc->ockl", rng.normal(size=(CHANNELS, RANK, 3, 3)) / 10, directions)
    return tiny(
        "float[N,8,6,6] x => float[] y",
        "h = Conv<pads=[1,1,1,1]>(x, first)\nr = Relu(h)\nm = Conv<pads=[1,1,1,1]>(r, low)\ns = Relu(m)\n"
        "both = Add(r, s)\ny = Conv(both, last)",
        {"first": (CHANNELS, 8, 1, 1), "low": low.astype(np.float32), "last": (6, CHANNELS, 1, 1)},
    )


def test_two_layers_hold_no_more_than_the_one_that_they_were() -> None:
    found = onnxgrail.inspect(planted())
    (block,) = [one for one in found.blocks if one["kind"] == "rank"]
    assert block["params"] == CHANNELS * CHANNELS * 9
    assert block["macs"] == 8 * 8 * CHANNELS * CHANNELS * 9 < found.macs


def block_of(result: Any) -> dict[str, Any]:
    """The report entry of the channels between two convolutions."""
    (found,) = [block for block in result.report.data["blocks"] if block["kind"] == "rank"]
    return dict(found)


def test_a_planted_rank_is_found_exactly(images: dict[str, Array]) -> None:
    model = planted()
    result = onnxgrail.compress(model, data=images, target_params="45%", round_to=1)
    assert RANK <= block_of(result)["kept"] < CHANNELS
    assert sum(node.op_type == "Conv" for node in result.model.graph) == 4
    want, got = run(model, images)["y"], run(result.model, images)["y"]
    assert np.square(got - want).sum() < 1e-5 * np.square(want).sum()


def test_convolutions_that_keep_all_channels_stay_one(images: dict[str, Array]) -> None:
    name = next(b["name"] for b in onnxgrail.inspect(planted()).blocks if b["kind"] == "stream")
    result = onnxgrail.compress(planted(), data=images, widths={name: 40})
    alone = onnxgrail.compress(planted(), data=images, widths={name: 40}, blocks=OTHERS)
    assert numbers(result) == numbers(alone)


def test_a_dry_run_predicts_the_file_and_a_recipe_repeats_it(tmp_path: Path, images: dict[str, Array]) -> None:
    path, recipe = tmp_path / "model.onnx", tmp_path / "recipe.yaml"
    ir.save(planted(), path)
    choice: dict[str, Any] = {"data": images, "target_params": "45%"}
    planned = onnxgrail.compress(path, dry_run=True, **choice).report.data["model"]
    done = onnxgrail.compress(path, tmp_path / "small.onnx", save_recipe=recipe, **choice).report.data["model"]
    assert planned["params_after"] == done["params_after"]
    assert planned["bytes_after"] == done["bytes_after"] == (tmp_path / "small.onnx").stat().st_size
    onnxgrail.apply(recipe, path, tmp_path / "again.onnx", data=images)
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "small.onnx").read_bytes()


@pytest.mark.parametrize(
    "choice",
    [
        {"unit_ratio": 0.3},
        {"ratio": 0.3, "compensate": "grail"},
        {"ratio": 0.3, "allocate": "uniform"},
        {"ratio": 0.3, "blocks": OTHERS},
    ],
)
def test_other_methods_leave_one_convolution(choice: dict[str, Any], images: dict[str, Array]) -> None:
    result = onnxgrail.compress(planted(), data=images, **choice)
    assert sum(node.op_type == "Conv" for node in result.model.graph) == 3


def test_without_data_there_is_one_convolution() -> None:
    result = onnxgrail.compress(planted(), ratio=0.3)
    assert sum(node.op_type == "Conv" for node in result.model.graph) == 3


def test_inspect_tells_what_is_between_two_convolutions() -> None:
    found = onnxgrail.inspect(planted())
    (block,) = [block for block in found.blocks if block["kind"] == "rank"]
    assert block["units"] == CHANNELS
    weights = sum(tensor.const_value.size for tensor in planted().graph.initializers.values() if tensor.const_value)
    assert found.params == weights
    assert found.shares["rank"]["params"] == pytest.approx(9 * CHANNELS**2 / weights)
    assert found.shares["all"]["params"] <= 1
    assert all(row["params"] < weights for row in found.predicted)


def test_the_whole_of_a_ratio_is_that_of_one_convolution(images: dict[str, Array]) -> None:
    result = onnxgrail.compress(planted(), data=images, ratio=0.4, round_to=1)
    found = result.report.data["model"]
    weights = sum(tensor.const_value.size for tensor in planted().graph.initializers.values() if tensor.const_value)
    assert found["ratio_total"] <= weights
    gone = found["params_before"] - found["params_after"]
    assert gone / found["ratio_total"] == pytest.approx(found["achieved_ratio"])
    assert found["achieved_ratio"] == pytest.approx(0.4, abs=0.03)


def test_a_convolution_in_a_branch_becomes_two(images: dict[str, Array]) -> None:
    low = planted().graph.initializers["low"].const_value
    assert low is not None
    model = tiny(
        "float[N,8,6,6] x => float[] y",
        "top = ReduceMax<keepdims=0>(x)\ngate = Greater(top, least)\nh = Conv<pads=[1,1,1,1]>(x, first)\nr = Relu(h)\n"
        "m = If(gate) <then_branch = full () => (float[] t) { t = Conv<pads=[1,1,1,1]>(r, low) },"
        " else_branch = none () => (float[] e) { e = Neg(r) }>\n"
        "s = Relu(m)\nboth = Add(r, s)\ny = Conv(both, last)",
        {
            "first": (CHANNELS, 8, 1, 1),
            "low": low.numpy(),
            "last": (6, CHANNELS, 1, 1),
            "least": np.array(-9, np.float32),
        },
    )
    (block,) = [block for block in onnxgrail.inspect(model).blocks if block["kind"] == "rank"]
    result = onnxgrail.compress(model, data=images, widths={block["name"]: RANK})
    want, got = (run(one, images)["y"] for one in (model, result.model))
    assert np.square(got - want).sum() < 1e-5 * np.square(want).sum()


def test_a_convolution_that_makes_an_output_becomes_two(images: dict[str, Array]) -> None:
    """Its part of a single tap comes second, and takes the name of the output."""
    rng = np.random.default_rng(0)
    low = np.einsum("or,rckl->ockl", rng.normal(size=(32, RANK)), rng.normal(size=(RANK, CHANNELS, 3, 3)) / 20)
    model = tiny(
        "float[N,8,6,6] x => float[] y",
        "h = Conv(x, first)\nr = Relu(h)\ny = Conv<pads=[1,1,1,1]>(r, last)",
        {"first": (CHANNELS, 8, 1, 1), "last": low.astype(np.float32)},
    )
    (block,) = [block for block in onnxgrail.inspect(model).blocks if block["kind"] == "rank"]
    result = onnxgrail.compress(model, data=images, widths={block["name"]: RANK})
    assert [value.name for value in result.model.graph.outputs] == ["y"]
    want, got = (run(one, images)["y"] for one in (model, result.model))
    assert np.square(got - want).sum() < 1e-5 * np.square(want).sum()
