"""`--quantize int4` with little memory: in parts, without targets, without copies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from bench import large_model
from onnxgrail.finishing import quantized, ship
from onnxgrail.graph.io.model_file import load, weight_bytes
from onnxgrail.machine import amounts
from onnxgrail.narrowing.bits import stage
from tests.e2e import nets
from tests.e2e.rounded import FEED, ROWS, WHOLE, lost, small


def test_layers_that_take_too_much_memory_together_are_measured_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and projection of a gated MLP read the same rows."""
    sizes = {"width": 32, "hidden": 64, "heads": 4, "words": 50, "tokens": 8}
    large_model.write(tmp_path / "m.onnx", depth=1, dtype="fp32", **sizes)
    data = {"ids": np.random.default_rng(1).integers(0, 50, (64, 8))}
    monkeypatch.setattr(amounts, "FIT", 370_000)  # bytes; the two need 430 kB, each alone 240 kB
    _, report = small(tmp_path / "m.onnx", "m4.onnx", data=data, cache_budget="64K")
    entries = {m["weight"]: m for m in report["quantization"]["matrices"]}
    for name in ("gate", "up", "down", "q", "k", "v", "o"):
        assert entries[f"layer0/{name}/weight"]["rounding"] == "carried", name


def test_a_matrix_that_takes_too_much_memory_names_the_option_that_allows_it(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amounts, "FIT", 300_000)
    monkeypatch.setattr(amounts, "PER_CACHE", 1e-3)  # so that budgets are in tenths of GiB, too
    _, report = small(wide, "m4.onnx", cache_budget="100M")
    notes = report["quantization"]["notes"]
    (note,) = [note for note in notes if "nearest" in note]
    match = re.search(r"^2 of 4 weights .*: inputs are not measured: .* --cache-budget ([0-9.]+G) allows", note)
    assert match is not None, note
    reasons = {m["weight"]: m["reason"] for m in report["quantization"]["matrices"] if m["rounding"] == "nearest"}
    assert all("--cache-budget" in reason for reason in reasons.values())
    budget = max(re.findall(r"--cache-budget ([0-9.]+G)", note))
    _, report = small(wide, "m4.onnx", cache_budget=budget)
    assert not [note for note in report["quantization"]["notes"] if "nearest" in note]


def test_a_matrix_that_takes_too_much_memory_with_targets_follows_its_own_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(nets.mlp((24, 96, 200, 10)), path)
    plain, _ = small(path, "nearest.onnx", data=None, held_out=None)
    whole, _ = small(path, "whole.onnx")
    monkeypatch.setattr(amounts, "FIT", 2_000_000)  # bytes; 96 x 200 needs 2.2 MB with targets, 1.5 MB without
    monkeypatch.setattr(stage, "TOGETHER", 150)
    found, report = small(path, "alone.onnx", cache_budget="64K")
    assert lost(whole, path) < lost(found, path) < 0.6 * lost(plain, path)
    alone = [m for m in report["quantization"]["matrices"] if m["reason"].startswith("not fitted to the dense network")]
    assert [(m["rounding"], m["after"] < m["before"]) for m in alone] == [("carried", True)]
    assert any(note.startswith("1 of 3 weights are not fitted") for note in report["quantization"]["notes"])


@pytest.mark.parametrize("apart", [True, False])
def test_the_comparison_copies_no_weights_that_stay_in_files(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, setups = nets.mlp((24, 256, 10)), []
    if apart:
        onnx.save_model(model, tmp_path / "x.onnx", save_as_external_data=True, location="x.data", size_threshold=1024)
    run_both = quantized.run_both

    def recorded(pair: Any, batches: Any, setup: Any) -> Any:
        setups.append(setup)
        return run_both(pair, batches, setup)

    monkeypatch.setattr(quantized, "run_both", recorded)
    given = tmp_path / "x.onnx" if apart else model
    onnxgrail.compress(given, tmp_path / "x4.onnx", data=FEED, held_out=0, **WHOLE)
    assert [(one.once, one.optimise) for one in setups] == [(apart, not apart)]


@pytest.mark.parametrize(("dtype", "most"), [(np.float32, 2.2), (np.float16, 4.4)])
def test_latency_is_measured_unasked_only_if_the_models_fit_into_the_memory(
    dtype: Any, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Original, narrowed and quantized model are open at once; half precision runs in float32."""
    onnx.save(nets.mlp((24, 256, 256, 10), dtype=dtype), tmp_path / "x.onnx")
    size = weight_bytes(load(tmp_path / "x.onnx"))
    made = {}
    for share in (0.9, 1.1):
        monkeypatch.setattr(ship, "UNASKED", share * most * size)
        for latency in (False, True):
            _, report = small(tmp_path / "x.onnx", "x4.onnx", data={"x": ROWS[:64].astype(dtype)}, latency=latency)
            made[share, latency] = report["quantization"]["latency_ms"] is not None
    assert made == {(0.9, False): False, (0.9, True): True, (1.1, False): True, (1.1, True): True}
