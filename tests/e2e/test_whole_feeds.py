"""Models whose inputs have no axis that counts samples, although sizes are open: waveforms, sequences of features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.graph.io.model_file import save
from tests.tiny import tiny

WAVES = "float[T] x => float[1,5] y"
REST = """
    b = Relu(a)
    c = Conv<strides = [2]>(b, w1)
    d = Relu(c)
    e = GlobalAveragePool(d)
    f = Flatten(e)
    y = MatMul(f, w2)
"""
BODY = f"""
    t = Unsqueeze(x, first)
    a = Conv<strides = [4]>(t, w0){REST}"""
WEIGHTS: dict[str, Any] = {"w0": (16, 1, 16), "w1": (24, 16, 5), "w2": (24, 5), "first": np.array([0, 1])}
FRAMES = "float[T,6] x => float[1,5] y"
SUMMED = f"""
    t = Transpose<perm = [1, 0]>(x)
    u = Unsqueeze(t, front)
    a = Conv<strides = [4]>(u, w0){REST}"""
OTHERS: dict[str, Any] = {"w0": (16, 6, 16), "w1": (24, 16, 5), "w2": (24, 5), "front": np.array([0])}
CASES = {"waves": (WAVES, BODY, WEIGHTS, ()), "frames": (FRAMES, SUMMED, OTHERS, (6,))}


def feed(seed: int, more: tuple[int, ...]) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(int(rng.integers(150, 250)), *more))
    return {"x": np.cumsum(steps, axis=0).astype(np.float32) / 8}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, list[dict[str, Array]]]:
    """A model, a folder with a file per sample, and the same feeds."""
    signature, body, weights, more = CASES[request.param]
    path, folder = tmp_path / "m.onnx", tmp_path / "data"
    save(tiny(signature, body, weights), path)
    folder.mkdir()
    feeds = [feed(n, more) for n in range(24)]
    for n, one in enumerate(feeds):
        np.savez(folder / f"{n}.npz", **one)  # type: ignore[arg-type]
    return path, folder, feeds


def test_files_of_open_length_are_passed_whole(case: tuple[Path, Path, list[dict[str, Array]]]) -> None:
    path, folder, feeds = case
    out = path.with_name("o.onnx")
    report = onnxgrail.compress(path, out, data=folder, unit_ratio=0.5).report.data
    assert [block["kept"] for block in report["blocks"]] == [8, 12]
    assert report["calibration"]["samples"] == 24
    assert any("every file is one sample" in note for note in report["calibration"]["notes"])
    direct = onnxgrail.compress(path, data=feeds, unit_ratio=0.5).report.data
    assert direct["calibration"]["samples"] == 24
    assert direct["blocks"] == report["blocks"]


def test_a_loss_is_found_on_feeds_of_open_length(case: tuple[Path, Path, list[dict[str, Array]]]) -> None:
    path, folder, _ = case
    report = onnxgrail.compress(path, data=folder, max_loss=0.2, minimize="params").report.data
    search = report["allocation"]["search"]
    loss = search["tried"][search["chosen"]]["loss"]
    assert (loss["samples"], search["crossed"]) == (24, True)
    assert loss["bound"] <= 0.2


def test_compare_passes_files_whole_and_times_one(case: tuple[Path, Path, list[dict[str, Array]]]) -> None:
    path, folder, _ = case
    found = onnxgrail.compare(path, path, data=folder, latency=True)
    assert found.outputs[0].samples == 24
    assert found.latency is not None
