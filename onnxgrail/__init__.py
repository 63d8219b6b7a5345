"""onnxgrail makes ONNX models smaller and faster without training.

    import onnxgrail

    result = onnxgrail.compress("model.onnx", "smaller.onnx", ratio=0.3, data="samples.npz")
    print(result.report.data["model"])

Names are imported on first use, so that `onnxgrail --help` starts at once.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from onnxgrail.benchmark import bench
    from onnxgrail.comparison import Comparison, compare
    from onnxgrail.core import Recipe
    from onnxgrail.demonstration import demo
    from onnxgrail.errors import (
        DataError,
        DeviceError,
        LostProcessError,
        MissingExtraError,
        ModelError,
        NothingToCompressError,
        OnnxGrailError,
        OutputError,
        RewriteError,
        UsageError,
    )
    from onnxgrail.exporting.call import export
    from onnxgrail.inspection import inspect
    from onnxgrail.pipeline import compress
    from onnxgrail.processes import join
    from onnxgrail.refinement import refine_model
    from onnxgrail.repetition import apply
    from onnxgrail.report import Inspection, Report
    from onnxgrail.result import Result

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "DataError",
    "DeviceError",
    "Inspection",
    "LostProcessError",
    "MissingExtraError",
    "ModelError",
    "NothingToCompressError",
    "OnnxGrailError",
    "OutputError",
    "Recipe",
    "Report",
    "Result",
    "RewriteError",
    "UsageError",
    "__version__",
    "apply",
    "bench",
    "compare",
    "compress",
    "demo",
    "export",
    "inspect",
    "join",
    "refine_model",
]

_ERRORS = [name for name in __all__ if name.endswith("Error")]
_WHERE = {
    **dict.fromkeys(_ERRORS, "errors"),
    "Comparison": "comparison",
    "Inspection": "report",
    "Recipe": "core",
    "Report": "report",
    "Result": "result",
    "apply": "repetition",
    "bench": "benchmark",
    "compare": "comparison",
    "compress": "pipeline",
    "demo": "demonstration",
    "export": "exporting.call",
    "inspect": "inspection",
    "join": "processes",
    "refine_model": "refinement",
}


def __getattr__(name: str) -> Any:
    """Import a public name where it is defined, once."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
