"""`--resume` with `--refine`: fits that were made are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail.torchgraph import fit as fitting
from tests.tiny import mlp
from tests.torchgraph.test_refine import data, short

__all__ = ["short"]  # a fixture of every test here, too


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


@pytest.mark.parametrize(
    "choices",
    [
        {"refine": "laco,distill"},
        {"refine": "regional,norms"},
        {"refine": "laco", "method": "grail,ic"},
        {"refine": "laco", "method": "grail,grasp", "grasp_retain": 0.3, "grasp_layers": "1"},
    ],
)
def test_a_killed_run_goes_on_behind_the_last_fit(
    choices: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of a run that was left alone, and what is known is not fitted again."""
    real, calls, limit = fitting.fit, list[int](), [1000]

    def dying(*args: Any, **named: Any) -> Any:
        if len(calls) >= limit[0]:
            raise Killed
        calls.append(1)
        return real(*args, **named)

    def run(output: str, fits: int, **more: Any) -> list[dict[str, Any]]:
        calls.clear()
        limit[0] = fits
        entries = onnxgrail.compress(model, tmp_path / output, **words, **more).report.data["refines"]
        return [{**entry, "seconds": 0} for entry in entries]

    monkeypatch.setattr(fitting, "fit", dying)
    model = ir.to_proto(mlp(4, 16))
    words = {"data": data(), "ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "check": False, **choices}
    wanted = run("whole.onnx", 1000)
    every = len(calls)
    assert every >= 3
    for fits in (1, every - 1):
        with pytest.raises(Killed):
            run(f"out{fits}.onnx", fits, resume=tmp_path / f"kept{fits}")
        assert not (tmp_path / f"out{fits}.onnx").exists()
        assert run(f"out{fits}.onnx", 1000, resume=tmp_path / f"kept{fits}") == wanted
        assert len(calls) == every - fits
        assert (tmp_path / f"out{fits}.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
