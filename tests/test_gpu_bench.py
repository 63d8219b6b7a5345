"""The script for the GPU, at a size that any machine runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bench import gpu_llama

TINY = {"depth": 2, "width": 32, "hidden": 64, "heads": 4, "words": 50, "tokens": 12, "samples": 5, "batch-size": 2}


def test_the_measurement_runs_on_the_cpu(tmp_path: Path) -> None:
    words = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    found = gpu_llama.measure(gpu_llama.parsed([*words, "--device", "cpu"]), tmp_path)
    assert found["narrowed"] == 2 * TINY["depth"]  # the MLP and the heads of every layer
    assert 0 < found["timing"]["forward"] < found["seconds"]
    assert found["host_peak_bytes"] > 0
    assert found["paper"]["calibration_seconds"] == 58.1
    assert (tmp_path / "small.onnx").stat().st_size > 0


def test_several_gpus_take_several_processes(tmp_path: Path) -> None:
    words = gpu_llama.command(gpu_llama.parsed(["--device", "cuda:0,1"]), tmp_path)
    assert words[1:6] == ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    assert words[words.index("--device") + 1] == "cuda:0,1"


def test_memory_is_counted_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, seen = iter([["A"], ["100"], ["700"], ["400"]]), threading.Event()

    def used(what: str) -> list[str]:
        found = next(readings, None)
        if found is None:
            seen.set()
        return found or ["300"]

    monkeypatch.setattr(gpu_llama, "used", used)
    monkeypatch.setattr(gpu_llama, "EVERY", 0.001)
    gpus = gpu_llama.Gpus()
    gpus.start()
    assert seen.wait(10)
    assert gpus.stop() == [600]
