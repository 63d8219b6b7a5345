"""The results of commands that write a model, or a folder of models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.graph.io import interop, model_file
from onnxgrail.report.report import Report


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Result:
    """The result of `compress`, `apply` or `refine_model`.

    Attributes:
        report: the report of the run.
        output: the written file, None if no file was requested.
        model: the graph as it is written.
        gates_passed: True if `min_cosine` and, with `strict`, the target's limits hold; the file is written either way.
    """

    report: Report
    output: Path | None
    model: ir.Model
    gates_passed: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what `pickle` and `copy` need, so that a worker process can return a result."""
        return _restored, (self.report, self.output, self.to_bytes(), self.gates_passed)

    def __repr__(self) -> str:
        return "\n".join([str(self.report), self._written])

    def _repr_html_(self) -> str:
        from onnxgrail.report.page.html.markup import el

        return self.report._repr_html_() + el("p", self._written)

    @property
    def _written(self) -> str:
        return f"Written: {self.output}" if self.output is not None else "No model was written"

    def proto(self) -> onnx.ModelProto:
        """Return the model as a message, with all weights inside."""
        return interop.to_proto(self.model)

    def to_bytes(self) -> bytes:
        """Return the model as the bytes of a file."""
        return interop.to_bytes(self.model)

    def graphsurgeon(self) -> Any:
        """Return the model as an `onnx_graphsurgeon.Graph`."""
        return interop.to_graphsurgeon(self.model)


def _restored(report: Report, output: Path | None, content: bytes, gates_passed: bool) -> Result:
    model = model_file.load(content)
    return Result(report=report, output=output, model=model, gates_passed=gates_passed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class FolderResult:
    """The result of `compress_folder`.

    Attributes:
        output: the written folder, None if none was requested.
        results: the result of each compressed model, by its path in the folder.
        copied: models that were copied as they are, with the reason.
        left_out: files that were not copied, with the reason.
    """

    output: Path | None
    results: Mapping[str, Result]
    copied: Mapping[str, str]
    left_out: Mapping[str, str]

    def __repr__(self) -> str:
        lines = [str(result) for result in self.results.values()]
        return "\n".join([*lines, *self.lines()])

    def lines(self) -> list[str]:
        """Return one line of text per model and file that was not compressed."""
        found = [f"Copied as it is: {name}: {why}" for name, why in self.copied.items()]
        return [*found, *(f"Left out: {name}: {why}" for name, why in self.left_out.items())]

    @property
    def gates_passed(self) -> bool:
        """Return True if the gates of all models hold."""
        return all(result.gates_passed for result in self.results.values())

    def to_json(self) -> str:
        """Return the reports as JSON, by model."""
        reports = {name: result.report.data for name, result in self.results.items()}
        return json.dumps({"models": reports, "copied": self.copied, "left_out": self.left_out}, indent=2)
