"""The one place that opens ONNX Runtime sessions."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np

from onnxgrail.core import Array, Feed
from onnxgrail.errors import MissingExtraError, ModelError, UsageError

CPU = ("CPUExecutionProvider",)
REPAIR = "Run: pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxgrail[gpu]' (or [cpu])"


class Session:
    """Owns one ONNX Runtime session; a context manager that lets go of it.

    Attributes:
        inputs: names of the inputs a feed must hold.
        output_names: names of what `run` returns, in order.
        providers: execution providers the session really got.
    """

    def __init__(self, handle: Any, outputs: tuple[str, ...]) -> None:
        self._handle = handle
        self.inputs: tuple[str, ...] = tuple(i.name for i in handle.get_inputs())
        self.output_names = outputs
        self.providers: tuple[str, ...] = tuple(handle.get_providers())

    def run(self, feed: Feed) -> dict[str, Array]:
        """Outputs by name, owned by the caller.

        Raises:
            ModelError: ONNX Runtime fails on this feed.
        """
        if self._handle is None:
            raise ModelError("the session is closed")
        try:
            values = self._handle.run(list(self.output_names), {n: feed[n] for n in self.inputs})
        except KeyError as error:
            raise ModelError(f"the feed has no value for input {error}") from error
        except Exception as error:
            shapes = ", ".join(f"{n}{list(np.shape(v))}" for n, v in feed.items())
            raise ModelError(f"ONNX Runtime failed on the feed {shapes}: {reason(error)}") from error
        return dict(zip(self.output_names, values, strict=True))

    def close(self) -> None:
        """Free the session; running it afterwards is an error."""
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_session(
    source: bytes | str | Path,
    *,
    providers: Sequence[str] = CPU,
    outputs: Sequence[str] | None = None,
    optimise: bool = True,
    threads: int | None = None,
    folder: Path | None = None,
    extended: bool = True,
) -> Session:
    """A session for a model file or a serialised model.

    Args:
        source: path, or bytes of a ModelProto.
        providers: execution providers, the preferred one first; it must really be got.
        outputs: graph outputs to compute; None computes all.
        optimise: let ONNX Runtime optimise the graph.
        threads: threads inside one operator; None takes OMP_NUM_THREADS, as all linear algebra does, and without that
            leaves it to ONNX Runtime.
        folder: where external data of a serialised model lie.
        extended: fuse beyond constant folding; off where many tensors of a convolutional net are read, since blocked
            layouts would be converted back for each.

    Raises:
        MissingExtraError: ONNX Runtime is not installed, or two builds of it fight.
        UsageError: a provider that this build does not have.
        ModelError: ONNX Runtime refuses the model or the provider does not start.
    """
    ort = runtime()
    _check_providers(ort, providers)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what matters arrives as an exception
    level = ort.GraphOptimizationLevel
    wanted = level.ORT_ENABLE_ALL if extended else level.ORT_ENABLE_BASIC
    options.graph_optimization_level = wanted if optimise else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads if threads is not None else _asked_threads()
    # Spinning workers would take the cores from the linear algebra between two runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        handle = ort.InferenceSession(
            source if isinstance(source, bytes) else str(source), sess_options=options, providers=list(providers)
        )
    except Exception as error:
        hint = "Try it in onnxruntime alone; a newer release may know its opset"
        raise ModelError(f"ONNX Runtime cannot run this model: {reason(error)}", hint=hint) from error
    got = handle.get_providers()
    if providers and providers[0] not in got:
        raise ModelError(
            f"asked for {providers[0]}, ONNX Runtime gave {', '.join(got)}",
            hint="Check driver, CUDA and cuDNN, or use --device cpu",
        )
    names = [o.name for o in handle.get_outputs()]
    unknown = [n for n in outputs or () if n not in names]
    if unknown:
        raise ModelError(f"the model has no output {', '.join(map(repr, unknown))}", hint=f"It has {', '.join(names)}")
    return Session(handle, tuple(outputs if outputs is not None else names))


def _asked_threads() -> int:
    """What the environment asks for (`torchrun` sets it, so that processes do not fight for cores); 0 where nothing."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() else 0


def runtime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        MissingExtraError: not installed, or the CPU and the GPU wheel are both installed and overwrite each other.
    """
    builds = [name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)]
    if len(builds) == 2:
        raise MissingExtraError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files", hint=REPAIR
        )
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingExtraError("ONNX Runtime is not installed", hint="Run: pip install 'onnxgrail[cpu]'") from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise MissingExtraError("the installation of ONNX Runtime is broken", hint=REPAIR)
    return onnxruntime


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_providers(ort: ModuleType, providers: Sequence[str]) -> None:
    available = ort.get_available_providers()
    for name in providers:
        if name not in available:
            hint = f"It has {', '.join(available)}"
            if name == "CUDAExecutionProvider":
                hint += "; run: pip uninstall -y onnxruntime && pip install 'onnxgrail[gpu]'"
            raise UsageError(f"this build of ONNX Runtime has no {name}", hint=hint)
    if "CUDAExecutionProvider" in providers and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def reason(error: BaseException) -> str:
    """The message of an ONNX Runtime exception without its error-code prefix, source lines and stack."""
    text = " ".join(str(error).split())
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"/\S+?/onnxruntime/\S+:\d+ .*?\) ", "", text)
    return text[:400]
