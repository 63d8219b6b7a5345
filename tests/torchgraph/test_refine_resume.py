"""`--resume` with `--refine`: fits that were made are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch")

import onnxgrail
from onnxgrail.torchgraph import fit as fitting
from tests.tiny import mlp
from tests.torchgraph.test_reference import pruned
from tests.torchgraph.test_refine import data, short

__all__ = ["short"]  # a fixture of every test here, too


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


class Mortal:
    """Fits, counted, and how many there may be until the run is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.limit, self._real = 0, 1000, fitting.fit
        monkeypatch.setattr(fitting, "fit", self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.calls >= self.limit:
            raise Killed
        self.calls += 1
        return self._real(*args, **named)

    def allow(self, fits: int) -> None:
        """Begin to count anew."""
        self.calls, self.limit = 0, fits


@pytest.mark.parametrize(
    "choices",
    [
        {"refine": "laco,distill"},
        {"refine": "laco,norms"},
        {"refine": "laco", "method": "grail,ic"},
        {"refine": "laco", "method": "grail,grasp", "grasp_retain": 0.3, "grasp_layers": "1"},
    ],
)
def test_a_killed_run_goes_on_behind_the_last_fit(
    choices: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of a run that was left alone, and what is known is not fitted again."""
    fits = Mortal(monkeypatch)

    def run(output: str, allowed: int, **more: Any) -> list[dict[str, Any]]:
        fits.allow(allowed)
        entries = onnxgrail.compress(model, tmp_path / output, **words, **more).report.data["refines"]
        return [{**entry, "seconds": 0} for entry in entries]

    model = ir.to_proto(mlp(4, 16))
    words = {"data": data(), "unit_ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "check": False, **choices}
    killed_and_continued(run, fits, tmp_path)


def test_a_killed_fit_of_a_foreign_model_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder belongs to both models."""
    fits = Mortal(monkeypatch)
    dense = mlp(4, 16)
    small, words = ir.to_proto(pruned(dense)), {"reference": ir.to_proto(dense), "data": data(), "check": False}

    def run(output: str, allowed: int, **more: Any) -> list[dict[str, Any]]:
        fits.allow(allowed)
        entries = onnxgrail.refine_model(small, tmp_path / output, **words, **more).report.data["refines"]
        return [{**entry, "seconds": 0} for entry in entries]

    killed_and_continued(run, fits, tmp_path)
    small = ir.to_proto(dense)
    with pytest.raises(onnxgrail.UsageError, match="belongs to another run: small was"):
        run("out1.onnx", 1000, resume=tmp_path / "kept1")


def killed_and_continued(run: Callable[..., Any], fits: Mortal, folder: Path) -> None:
    """Killed after the first fit and before the last."""
    wanted = run("whole.onnx", 1000)
    every = fits.calls
    assert every >= 3
    for allowed in (1, every - 1):
        output, kept = f"out{allowed}.onnx", folder / f"kept{allowed}"
        with pytest.raises(Killed):
            run(output, allowed, resume=kept)
        assert not (folder / output).exists()
        assert run(output, 1000, resume=kept) == wanted
        assert fits.calls == every - allowed
        assert (folder / output).read_bytes() == (folder / "whole.onnx").read_bytes()
        assert run(output, 0, resume=kept) == wanted
