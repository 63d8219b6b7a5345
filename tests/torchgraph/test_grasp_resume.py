"""`--resume` with `--method grasp`: gradients, pairs and fits that were found are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail import models
from onnxgrail.methods.grasp import fitting, pairs, steps
from tests.tiny import mlp
from tests.torchgraph.test_refine import data as vectors

WORK = {
    "redundancy": (steps, "redundancies"),
    "gradients": (steps, "slope_of"),
    "pairs": (pairs, "pair"),
    "fits": (fitting, "refit"),
    "errors": (steps, "apart"),
}
LLAMA = models.load("char_llama")


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Counts of each piece of work, and the number after which the run is killed."""
    found = {name: [0, 1000] for name in WORK}

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            if found[name][0] >= found[name][1]:
                raise Killed
            found[name][0] += 1
            return real(*words, **named)

        return call

    for name, (place, function) in WORK.items():
        monkeypatch.setattr(place, function, counted(name, getattr(place, function)))
    return found


def moments(every: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Behind so many calls of each: none, half, all but one."""
    for name, count in every.items():
        yield from ((name, after) for after in sorted({0, count // 2, count - 1}) if 0 <= after < count)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("mlp", {}),
        ("mlp", {"grasp_rank": "taylor", "grasp_refit": True}),
        ("mlp", {"grasp_rank": "magnitude", "grasp_whiten": True}),
        ("mlp", {"method": "grail,grasp", "unit_ratio": 0.5, "compensate": "none", "round_to": 1, "grasp_refit": True}),
        ("llama", {"grasp_whiten": True, "grasp_refit": True, "grasp_layers": 1, "samples": 24}),
    ],
)
def test_a_killed_run_goes_on_behind_the_last_step(
    name: str, choices: dict[str, Any], calls: dict[str, list[int]], tmp_path: Path
) -> None:
    """The bytes and the report are those of a run that was left alone, and what is known is not sought again."""
    model, data = (LLAMA.model, LLAMA.calibration) if name == "llama" else (ir.to_proto(mlp(4, 16)), vectors(96))

    def run(output: str, **more: Any) -> dict[str, Any]:
        for counts in calls.values():
            counts[0] = 0
        common = {"method": "grasp", "grasp_layers": 2, "grasp_retain": 0.3, "check": False, "samples": 40}
        found = onnxgrail.compress(model, tmp_path / output, data=data, **{**common, **choices, **more})
        return dict(found.report.data["methods"]["grasp"])

    wanted = run("whole.onnx")
    every = {name: counts[0] for name, counts in calls.items()}
    assert every["pairs"] == (7 if name == "llama" else 4)
    assert every["gradients"] == (choices.get("grasp_rank") != "magnitude")
    assert bool(every["fits"]) == bool(choices.get("grasp_refit"))
    killed = [("pairs", 3), ("fits", 3)] if name == "llama" else moments(every)  # that one in the middle of a layer
    for number, (work, after) in enumerate(killed):
        calls[work][1] = after
        kept, output = tmp_path / f"kept{number}", f"out{number}.onnx"
        with pytest.raises(Killed):
            run(output, resume=kept)
        done = {name: counts[0] for name, counts in calls.items()}
        assert not (tmp_path / output).exists()
        calls[work][1] = 1000
        assert run(output, resume=kept) == wanted
        assert {name: every[name] - counts[0] for name, counts in calls.items()} == done
        assert (tmp_path / output).read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    assert run("out0.onnx", resume=tmp_path / "kept0") == wanted
    assert not any(counts[0] for counts in calls.values())


def test_every_step_shows_progress() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    common: dict[str, Any] = {"method": "grasp", "grasp_layers": 1, "check": False, "samples": 16, "dry_run": True}
    onnxgrail.compress(
        LLAMA.model,
        data=LLAMA.calibration,
        grasp_refit=True,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
        **common,
    )
    for stage in ("redundancy", "gradients", "pairs", "refit"):
        assert seen[stage] == [(k, len(seen[stage]) - 1) for k in range(len(seen[stage]))]
    assert len(seen["pairs"]) == len(seen["refit"]) == 1 + 7
