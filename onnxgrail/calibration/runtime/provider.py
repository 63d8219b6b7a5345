"""Execution providers: those of a build, their memory, and the nodes that a GPU leaves to the CPU."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

from onnxgrail.errors import DeviceError, UsageError
from onnxgrail.machine.device import CUDA, Device

T = TypeVar("T")
U = TypeVar("U")

FULL = "Try a smaller --batch-size"
_FULL = re.compile(r"failed to allocate memory|out of memory|bad_alloc|_ALLOC_FAILED", re.IGNORECASE)
_LEFT: ContextVar[dict[str, str] | None] = ContextVar("left", default=None)


def check_providers(ort: ModuleType, providers: Sequence[str]) -> None:
    """Check that a build of ONNX Runtime has these providers, and load the libraries of CUDA.

    Raises:
        DeviceError: the build has no CUDA.
        UsageError: it lacks another provider.
    """
    available = ort.get_available_providers()
    for name in providers:
        if name == CUDA and name not in available:
            fix = "Run: pip uninstall -y onnxruntime && pip install 'onnxgrail[gpu]'"
            raise DeviceError(f"this build of ONNX Runtime has no {name}, only {', '.join(available)}", hint=fix)
        if name not in available:
            raise UsageError(f"this build of ONNX Runtime has no {name}", hint=f"It has {', '.join(available)}")
    if CUDA in providers and hasattr(ort, "preload_dlls"):
        _preload(ort.preload_dlls)


@functools.cache
def _preload(load: Callable[[], None]) -> None:
    """Load the CUDA libraries installed by pip, once, because it reads a dozen files."""
    with contextlib.redirect_stdout(sys.stderr):  # it prints missing libraries
        load()


@functools.cache
def one_arena(ort: ModuleType, device: Device) -> bool:
    """Make consecutive sessions on a device share a memory arena; return False if it fails.

    Fresh pages are expensive on a CPU.  On a GPU, arenas of several sessions would each keep what they have grown to.
    """
    config = {"max_mem": device.memory or 0, "arena_extend_strategy": 1, "initial_chunk_size_bytes": -1}
    name = "Cuda" if device.kind == "cuda" else "Cpu"
    try:
        arena = ort.OrtArenaCfg({**config, "max_dead_bytes_per_chunk": -1})
        kind, place = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, ort.OrtMemType.DEFAULT
        memory = ort.OrtMemoryInfo(name, kind, device.number, place)
        if device.kind == "cuda":
            ort.create_and_register_allocator_v2(CUDA, memory, {"device_id": str(device.number)}, arena)
        else:
            ort.create_and_register_allocator(memory, arena)
    except Exception:  # noqa: BLE001  an older runtime, or the program has registered its own
        return False
    return True


def is_full(error: BaseException) -> bool:
    """Return True if ONNX Runtime or torch has failed because there was not enough memory."""
    return isinstance(error, MemoryError) or _FULL.search(str(error)) is not None


def room_for(work: Callable[[], T], instead: Callable[[], U]) -> T | U:
    """Return the result of work on a device; if the device is full, that of `instead`.

    Torch gives back what it keeps for later before, since ONNX Runtime takes memory from the same GPU.
    """
    try:
        return work()
    except Exception as error:
        if not is_full(error):
            raise
    if "torch" in sys.modules:  # outside of the block, because the exception holds the tensors of `work`
        sys.modules["torch"].cuda.empty_cache()
    return instead()


@contextlib.contextmanager
def noting_left() -> Iterator[None]:
    """Remember, within a with-block, which nodes a GPU leaves to the CPU; `left` returns them."""
    token = _LEFT.set({})
    try:
        yield
    finally:
        _LEFT.reset(token)


def note_left(handle: Any) -> None:
    """Remember the nodes that a session on a GPU has given to the CPU, because the GPU has no kernel for them."""
    noted = _LEFT.get()
    if noted is None or not hasattr(handle, "get_provider_graph_assignment_info"):  # an older runtime
        return
    for part in handle.get_provider_graph_assignment_info():
        if part.ep_name != CUDA:
            noted.update((node.name, node.op_type) for node in part.get_nodes())


def left() -> dict[str, str]:
    """Return the operator of each node, by name, that sessions on a GPU have given to the CPU."""
    return dict(_LEFT.get() or {})
