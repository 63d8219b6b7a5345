"""The result of a command that writes a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.graph.io import interop
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
