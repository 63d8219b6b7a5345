"""The results of the stages of a run after its decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from onnxgrail.methods import Worked
from onnxgrail.report.report import Verification


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """The results of the stages after the decision.

    Attributes:
        slim: the narrowed graph; None if nothing was narrowed.
        final: the graph as it is written, if it differs from `slim`.
        weights: name of the file that takes the weights; empty if they stay in the model file.
        written: checksums of the written files, the model first.
        verification: the checks of the result.
        worked: results of refinements and further methods.
    """

    slim: ir.Model | None = None
    final: ir.Model | None = None
    weights: str = ""
    written: Mapping[Path, str] = field(default_factory=dict)
    verification: Verification | None = None
    worked: Worked = field(default_factory=Worked)
