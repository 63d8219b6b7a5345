"""onnxgrail makes ONNX models smaller and faster without training.

    import onnxgrail

    result = onnxgrail.compress("model.onnx", "smaller.onnx", ratio=0.3, data="samples.npz")
    print(result.report.data["model"])

Names are imported on first use, so that `onnxgrail --help` starts at once.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than this whole module
if TYPE_CHECKING:
    from typing import Any

    from onnxgrail.commands.apply import apply
    from onnxgrail.commands.bench import bench
    from onnxgrail.commands.compare import compare
    from onnxgrail.commands.compress import compress
    from onnxgrail.commands.demo import demo
    from onnxgrail.commands.folder import compress_folder
    from onnxgrail.commands.frontier import frontier
    from onnxgrail.commands.inspect import inspect
    from onnxgrail.commands.refine import refine_model
    from onnxgrail.errors import (
        DataError,
        DeviceError,
        LostProcessError,
        MetricError,
        MissingExtraError,
        ModelError,
        NothingToCompressError,
        OnnxGrailError,
        OutputError,
        RewriteError,
        UsageError,
    )
    from onnxgrail.exporting.call import export
    from onnxgrail.machine.group.torchrun import join
    from onnxgrail.options import Recipe
    from onnxgrail.report.comparison import Comparison
    from onnxgrail.report.frontier import Frontier
    from onnxgrail.report.report import Inspection, Report
    from onnxgrail.report.result import FolderResult, Result

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "DataError",
    "DeviceError",
    "FolderResult",
    "Frontier",
    "Inspection",
    "LostProcessError",
    "MetricError",
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
    "compress_folder",
    "demo",
    "export",
    "frontier",
    "inspect",
    "join",
    "refine_model",
]

_ERRORS = [name for name in __all__ if name.endswith("Error")]
_WHERE = {
    **dict.fromkeys(_ERRORS, "errors"),
    "Comparison": "report.comparison",
    "FolderResult": "report.result",
    "Frontier": "report.frontier",
    "Inspection": "report.report",
    "Recipe": "options",
    "Report": "report.report",
    "Result": "report.result",
    "apply": "commands.apply",
    "bench": "commands.bench",
    "compare": "commands.compare",
    "compress": "commands.compress",
    "compress_folder": "commands.folder",
    "demo": "commands.demo",
    "export": "exporting.call",
    "frontier": "commands.frontier",
    "inspect": "commands.inspect",
    "join": "machine.group.torchrun",
    "refine_model": "commands.refine",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, and keep it."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
