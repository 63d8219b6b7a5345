"""The only module that opens ONNX Runtime sessions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np

from onnxgrail.calibration.runtime.limit import limited
from onnxgrail.calibration.runtime.provider import FULL, check_providers, is_full, note_left, one_arena, room_for
from onnxgrail.calibration.runtime.threads import count
from onnxgrail.calibration.runtime.wording import reason, shapes_of
from onnxgrail.core import Array, Feed
from onnxgrail.errors import DeviceError, MissingExtraError, ModelError, OnnxGrailError, UsageError
from onnxgrail.graph.io.mapped import ROOT
from onnxgrail.graph.io.running.widen import wide
from onnxgrail.graph.io.serial import Packed
from onnxgrail.machine.device import Device, device_of
from onnxgrail.machine.extras import version_of

CPU = ("CPUExecutionProvider",)
REPAIR = "Run: pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'onnxgrail[gpu]' (or [cpu])"

LIBRARIES: ContextVar[tuple[str, ...]] = ContextVar("LIBRARIES", default=())  # of custom operators, for all sessions
LIBRARY = "Give a shared library built for ONNX Runtime, one that exports RegisterCustomOps"

CHECK_CUDA = (
    "Check driver, CUDA and cuDNN (pip install 'onnxgrail[gpu]' brings the libraries), or use --device cpu; "
    "nothing was run on the CPU instead"
)
_CUSTOM_OP = re.compile(r"(?<!\S)(?!com\.microsoft|ai\.onnx)[^\s:]+:\S+\(-?\d+\) is not a registered function/op")
_FAILED_DEVICE = re.compile(
    r"CUDA failure|CUDA error|cudaSetDevice|libcu|CUBLAS failure|CUDNN failure|no CUDA-capable|Invalid device ID",
    re.IGNORECASE,
)


class Session:
    """A context manager that owns an ONNX Runtime session.

    Attributes:
        inputs: names of the inputs that a feed must hold.
        output_names: names of the outputs of `run`, in order.
        types: ONNX Runtime's type of each output, such as `tensor(float)`.
        shapes: declared shape of each output; open sizes are names or None. given: of each input.
        providers: execution providers that the session actually has.
    """

    def __init__(self, handle: Any, outputs: tuple[str, ...]) -> None:
        self._handle = handle
        self.types: dict[str, str] = {o.name: o.type for o in handle.get_outputs()}
        self.shapes: dict[str, list[Any]] = {o.name: list(o.shape) for o in handle.get_outputs()}
        self.given: dict[str, list[Any]] = {i.name: list(i.shape) for i in handle.get_inputs()}
        self.inputs: tuple[str, ...] = tuple(i.name for i in handle.get_inputs())
        self.output_names = outputs
        self.providers: tuple[str, ...] = tuple(handle.get_providers())

    def run(self, feed: Feed) -> dict[str, Array]:
        """Run a feed; return the outputs by name, owned by the caller.

        Raises:
            ModelError: ONNX Runtime fails on this feed.
        """
        with self._explaining(feed):
            arrays = {n: wide(feed[n]) for n in self.inputs}
            with limited() as options:
                run = functools.partial(self._handle.run, list(self.output_names), arrays, options)
                values = room_for(run, run)
        return dict(zip(self.output_names, values, strict=True))

    def run_bound(self, feed: Feed, bind: Callable[[Any], None]) -> list[Any]:
        """Run a feed with inputs and outputs placed by `bind`; return OrtValues in the order in which it binds outputs.

        Raises:
            ModelError: ONNX Runtime fails on this feed.
        """
        with self._explaining(feed):
            binding = self._handle.io_binding()  # a reused binding would overwrite earlier outputs
            bind(binding)
            binding.synchronize_inputs()
            with limited() as options:
                run = functools.partial(self._handle.run_with_iobinding, binding, options)
                room_for(run, run)
            binding.synchronize_outputs()
            return list(binding.get_outputs())

    @contextlib.contextmanager
    def _explaining(self, feed: Feed) -> Iterator[None]:
        """Turn exceptions of a run into a `ModelError` with one line."""
        if self._handle is None:
            raise ModelError("the session is closed")
        try:
            yield
        except OnnxGrailError:
            raise
        except KeyError as error:
            raise ModelError(f"the feed has no value for input {error}") from error
        except Exception as error:
            hint = FULL if is_full(error) else ""
            raise ModelError(
                f"ONNX Runtime failed on the feed {shapes_of(feed)}: {reason(error)}", hint=hint
            ) from error

    def end_profile(self) -> Path:
        """End the measurement of kernels that `Setup.profile` asked for; return the path of its JSON file."""
        return Path(self._handle.end_profiling())

    def close(self) -> None:
        """Release the session; a later run is an error."""
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings with which ONNX Runtime runs a model.

    Attributes:
        providers: execution providers, the preferred one first (see `device_of`); a missing provider is an error.
        optimise: let ONNX Runtime optimize the graph.
        extended: optimize beyond constant folding; disable it to read many tensors of a convolutional network, since
            each would be converted back from a blocked layout.
        threads: threads inside an operator; None for the number that BLAS gets, too.
        once: expect few runs: do not copy weights or pack them for faster products.
        sizes: sizes of input dimensions by name, if all feeds agree; with open sizes, the runtime takes quadratic time
            for a deep model (measured: 0.58 s for 1586 nodes, 0.05 s with the batch size).
        deep: do not plan which tensors share memory; with open sizes the plan takes quadratic time (measured: 4.0 s for
            2001 nodes, 0.11 s without).
        timed: use memory as other programs do, for timings.
        profile: folder for a file with the time of every kernel (see `Session.end_profile`); None to measure nothing.
    """

    providers: Sequence[str] = CPU
    optimise: bool = True
    extended: bool = True
    threads: int | None = None
    once: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    deep: bool = False
    timed: bool = False
    profile: Path | None = None

    @classmethod
    def as_is(cls, providers: Sequence[str] = CPU) -> Setup:
        """Return the setup of a model that runs a few times as it is, without optimization or copies of weights."""
        return cls(providers=providers, optimise=False, once=True)


USUAL = Setup()


def open_session(
    source: Packed | bytes | str | Path, setup: Setup = USUAL, *, outputs: Sequence[str] | None = None
) -> Session:
    """Open a session for a model file or a serialized model.

    Args:
        source: path, bytes of a ModelProto, or such bytes with separate weights.
        setup: how the model is run.
        outputs: graph outputs to compute; None computes all.

    Raises:
        MissingExtraError: ONNX Runtime is not installed, or two builds of it conflict.
        UsageError: this build lacks a provider.
        DeviceError: the device does not start.
        ModelError: ONNX Runtime rejects the model.
    """
    ort, device = runtime(), device_of(setup.providers)
    check_providers(ort, device.names)
    options = _options(ort, device, setup)
    if isinstance(source, bytes | Packed):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", ROOT)
    if isinstance(source, Packed):
        values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for array in source.weights.values()]
        options.add_external_initializers(list(source.weights), values)
        source = source.data
    handle = _started(ort, source if isinstance(source, bytes) else str(source), options, device)
    names = [o.name for o in handle.get_outputs()]
    unknown = [n for n in outputs or () if n not in names]
    if unknown:
        raise ModelError(f"the model has no output {', '.join(map(repr, unknown))}", hint=f"It has {', '.join(names)}")
    return Session(handle, tuple(outputs if outputs is not None else names))


def write_optimised(source: Path | bytes, target: Path, setup: Setup, *, without: Sequence[str] = ()) -> None:
    """Write a model as ONNX Runtime optimizes it on the CPU."""
    ort = runtime()
    options = _options(ort, device_of(CPU), setup)
    options.optimized_model_filepath = str(target)
    model = source if isinstance(source, bytes) else str(source)
    ort.InferenceSession(model, options, providers=list(CPU), disabled_optimizers=list(without))


def _options(ort: ModuleType, device: Device, setup: Setup) -> Any:
    """Return ONNX Runtime's options for a setup."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what matters arrives as an exception
    register(options)
    level = ort.GraphOptimizationLevel
    wanted = level.ORT_ENABLE_ALL if setup.extended else level.ORT_ENABLE_BASIC
    options.graph_optimization_level = wanted if setup.optimise else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = setup.threads or count()
    here = device.names == CPU and not setup.once and not setup.timed
    if (device.kind == "cuda" or here) and one_arena(ort, device):
        options.add_session_config_entry("session.use_env_allocators", "1")
        # A planned run takes one large piece, and the arena seldom has one: tensors of earlier models are in it.
        options.enable_mem_pattern = setup.timed
    if device.kind == "cuda":
        options.use_deterministic_compute = True
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # Spinning workers would take cores from linear algebra between two runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_reuse = not setup.deep
    if setup.profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(setup.profile / "profile")
    for name, size in setup.sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    if setup.once:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        # The default order first runs all nodes that need no input: all casts of a half precision model, on a CPU
        # without kernels for it, would be in memory at once (measured: 3.2 GB; with this order 0.3 GB).
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    return options


def _started(ort: ModuleType, source: bytes | str, options: Any, device: Device) -> Any:
    """Open an InferenceSession with the preferred provider; by default the runtime would silently take another."""

    def start() -> Any:
        return ort.InferenceSession(source, sess_options=options, providers=device.providers, enable_fallback=0)

    try:
        handle = room_for(start, start)
    except Exception as error:
        if is_full(error):
            raise ModelError(f"no memory for this model on {device.place}: {reason(error)}", hint=FULL) from error
        if device.kind == "cuda" and _FAILED_DEVICE.search(str(error)):
            raise DeviceError(f"{device.place} does not start: {reason(error)}", hint=CHECK_CUDA) from error
        hint = "Try it in onnxruntime alone; a newer release may know its opset"
        if _CUSTOM_OP.search(str(error)):
            hint = "Give the library that has this operator: --custom-ops LIBRARY"
        raise ModelError(f"ONNX Runtime cannot run this model: {reason(error)}", hint=hint) from error
    got = handle.get_providers()
    if device.names and device.names[0] not in got:
        raise DeviceError(f"asked for {device.names[0]}, ONNX Runtime gave {', '.join(got)}", hint=CHECK_CUDA)
    if device.kind == "cuda":
        note_left(handle)
    return handle


def register(options: Any) -> None:
    """Register the custom operator libraries of the current context with session options.

    Raises:
        UsageError: ONNX Runtime cannot load one.
    """
    for path in LIBRARIES.get():
        try:
            options.register_custom_ops_library(path)
        except Exception as error:
            raise UsageError(f"--custom-ops {path} cannot be loaded: {reason(error)}", hint=LIBRARY) from error


def open_piece(source: Packed | bytes, setup: Setup, outputs: Sequence[str]) -> Session:
    """Open a session; without optimization if the runtime's optimizer fails on the graph.

    Raises:
        ModelError: as in `open_session`, without optimization.
    """
    try:
        return open_session(source, setup, outputs=outputs)
    except ModelError:
        return open_session(source, replace(setup, optimise=False), outputs=outputs)


def runtime() -> ModuleType:
    """Import and return the onnxruntime module, with telemetry off.

    From release 1.29 on it would send data on models and machine to its vendor. Telemetry stays as it is if the
    environment configures it or onnxruntime was imported before.

    Raises:
        MissingExtraError: not installed, or the CPU and the GPU wheel are both installed and overwrite each other.
    """
    builds = [name for name in ("onnxruntime", "onnxruntime-gpu") if version_of(name)]
    if len(builds) == 2:
        raise MissingExtraError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files", hint=REPAIR
        )
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingExtraError("ONNX Runtime is not installed", hint="Run: pip install 'onnxgrail[cpu]'") from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise MissingExtraError("the installation of ONNX Runtime is broken", hint=REPAIR)
    onnxruntime.set_default_logger_severity(4)  # what matters arrives as an exception
    return onnxruntime
