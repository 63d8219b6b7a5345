"""The model as it is written, and the results of its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.found import Found
from onnxgrail.core import Recipe
from onnxgrail.fidelity import Fidelity
from onnxgrail.finishing.verify import passes
from onnxgrail.machine.plain import plain
from onnxgrail.methods import Worked
from onnxgrail.report.report import Report, Verification
from onnxgrail.report.sizes import Made


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shipped:
    """The model as it is written, and the results of its checks.

    Attributes:
        model: the graph; narrowed: the same before quantization.
        verification, results: narrowed compared with original, None and empty without `recipe.check`; if the model was
            quantized, `results` are those of the quantized model.
        keys: `simplify`, `quantization`, `target` and `latency` of the report, None if not requested.
        weights: name of the file that takes the weights; empty if they stay in the model file.
    """

    model: ir.Model
    narrowed: ir.Model
    verification: Verification | None
    results: tuple[Fidelity, ...]
    keys: Mapping[str, Any]
    weights: str = ""

    def passes(self, recipe: Recipe) -> bool:
        """Return True if the outputs are close enough and, with `--strict`, the target runtime takes the model."""
        target = self.keys["target"]
        return passes(self.results, recipe) and (target is None or not target["strict"] or target["passed"])

    def exceeds(self, search: Found) -> bool:
        """Return True if the quantized model may lose more than a search was allowed to."""
        loss = (self.keys["quantization"] or {}).get("loss")
        return loss is not None and bool(loss["bound"] > search.limit)

    def made(self, worked: Worked, written: Mapping[Path, str]) -> Made:
        """Return the results of the run: these, those of further methods, and the checksums of the written files."""
        return Made(
            slim=self.narrowed,
            final=self.model,
            weights=self.weights,
            written=written,
            verification=self.verification,
            worked=worked,
        )

    def told(self, report: Report, said: Sequence[str] = ()) -> Report:
        """Return the report with the results of these steps, and further notes."""
        notes = [*report.data["notes"], *said]
        quantization = self.keys["quantization"]
        if quantization is not None:
            notes += quantization["notes"]
        return Report(data={**report.data, **plain(self.keys), "notes": notes})
