"""The example of docs/ci.md that logs a result to MLflow, with a module in its place that takes what MLflow takes."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.pages import ROOT, examples, furnish

NAME = re.compile(r"[\w\-. /:]{1,250}")
MOST, LONGEST = 100, 6000  # parameters of a call, and characters of a value


class Store(ModuleType):
    """Keeps what is logged, and refuses what MLflow 3 refuses."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.logged: dict[str, dict[str, Any]] = {"params": {}, "metrics": {}, "tags": {}, "artifacts": {}}
        self.active = False

    @contextlib.contextmanager
    def start_run(self) -> Iterator[None]:
        self.active = True
        yield
        self.active = False

    def log_params(self, params: Mapping[str, Any]) -> None:
        assert len(params) <= MOST
        self._keep("params", {key: str(value) for key, value in params.items()})
        assert all(len(value) <= LONGEST for value in self.logged["params"].values())

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        assert all(math.isfinite(float(value)) for value in metrics.values())
        self._keep("metrics", metrics)

    def set_tag(self, key: str, value: Any) -> None:
        self._keep("tags", {key: str(value)})

    def log_text(self, text: str, artifact_file: str) -> None:
        assert isinstance(text, str)
        self._keep("artifacts", {artifact_file: text})

    def log_artifact(self, local_path: str) -> None:
        assert isinstance(local_path, str)
        self._keep("artifacts", {Path(local_path).name: Path(local_path).read_bytes()})

    def _keep(self, kind: str, found: Mapping[str, Any]) -> None:
        assert self.active, "outside of a run"
        assert all(NAME.fullmatch(key) for key in found)
        assert not self.logged[kind].keys() & found.keys(), "logged twice"
        self.logged[kind] |= found


def test_a_result_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = examples((ROOT / "docs" / "ci.md").read_text(encoding="utf-8"))
    (block,) = (block for block in blocks if block.code.startswith("import mlflow\n"))
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    store = Store()
    monkeypatch.setitem(sys.modules, "mlflow", store)
    exec(compile(block.code, "ci.md", "exec"), {"__name__": "__main__"})

    params, metrics, tags, artifacts = store.logged.values()
    assert params["ratio"] == "0.3"
    assert params["compensate"] == "best"
    assert metrics["params_after"] < metrics["params_before"]
    assert 0 <= metrics["quality_low"] <= metrics["quality"] <= metrics["quality_high"] <= 1
    assert tags == {"quality": "top-1 agreement"}
    assert sorted(artifacts) == ["report.html", "small.onnx"]
    assert artifacts["small.onnx"] == (tmp_path / "small.onnx").read_bytes()
