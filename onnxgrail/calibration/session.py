"""The ONNX Runtime session: providers, threads, feeds.  Nothing else in the project opens one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from onnxgrail.core import Array, Feed
from onnxgrail.errors import MissingExtraError, ModelError

CPU = ("CPUExecutionProvider",)
FOLDER_KEY = "session.model_external_initializers_file_folder_path"


class Session:
    """Owns one ONNX Runtime session; a context manager that lets it go."""

    def __init__(self, inner: Any, outputs: Sequence[str] | None) -> None:
        self._inner = inner
        self.inputs: tuple[str, ...] = tuple(i.name for i in inner.get_inputs())
        self.output_names: tuple[str, ...] = tuple(outputs or (o.name for o in inner.get_outputs()))

    def run(self, feed: Feed) -> dict[str, Array]:
        """Outputs by name.

        Raises:
            ModelError: ONNX Runtime fails on this feed.
        """
        feeds = {name: np.ascontiguousarray(feed[name]) for name in self.inputs if name in feed}
        try:
            arrays = self._inner.run(list(self.output_names), feeds)
        except Exception as error:
            raise ModelError(f"ONNX Runtime cannot run this model: {first_line(error)}") from error
        return dict(zip(self.output_names, arrays, strict=True))

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner = None


def open_session(
    source: bytes | str | Path,
    *,
    providers: Sequence[str] = CPU,
    outputs: Sequence[str] | None = None,
    optimise: bool = True,
    threads: int | None = None,
    folder: str | Path | None = None,
) -> Session:
    """Open a model from bytes or a path.

    Args:
        source: serialised model, or its path.
        providers: execution providers in order of preference; the first must really be obtained.
        outputs: which outputs to compute; all by default.
        optimise: let ONNX Runtime fuse nodes; off keeps every intermediate tensor as the file says.
        threads: intra-op threads, by default one per core.
        folder: where external data of a model given as bytes lies.

    Raises:
        MissingExtraError: no usable onnxruntime is installed.
        ModelError: the model does not load, or the provider was not obtained.
    """
    ort = runtime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    if folder is not None and isinstance(source, bytes):
        options.add_session_config_entry(FOLDER_KEY, str(folder))
    try:
        inner = ort.InferenceSession(
            source if isinstance(source, bytes) else str(source), options, providers=list(providers)
        )
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot load this model: {first_line(error)}") from error
    if providers and inner.get_providers()[0] != providers[0]:
        raise ModelError(
            f"asked for {providers[0]} but the session runs on {inner.get_providers()[0]}",
            hint="install onnxgrail[gpu] and a matching driver, or choose --device cpu",
        )
    return Session(inner, outputs)


def runtime() -> Any:
    """The onnxruntime module.

    Raises:
        MissingExtraError: it is not installed, or two builds of it are and one hides the other.
    """
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _installed(name)]
    if len(installed) == 2:
        raise MissingExtraError(
            "both onnxruntime and onnxruntime-gpu are installed and overwrite each other",
            hint="run: pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxgrail[cpu] (or onnxgrail[gpu])",
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("ONNX Runtime is not installed", hint="run: pip install onnxgrail[cpu]") from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise MissingExtraError(
            "the onnxruntime module is empty (another build was uninstalled over it)",
            hint="run: pip install --force-reinstall onnxruntime",
        )
    return onnxruntime


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """The first line of a runtime error, shortened."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
