"""Devices: from names of execution providers to the settings of ONNX Runtime and torch.

A provider may be followed by the numbers of its devices: `CUDAExecutionProvider:1`, or `CUDAExecutionProvider:0,1` for
several processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from onnxgrail.errors import DeviceError, UsageError

CUDA = "CUDAExecutionProvider"
MEMORY = "ONNXGRAIL_GPU_MEMORY"
_UNITS = {"": 1, "M": 2**20, "G": 2**30}

# Statistics are sums of many products, so TF32 is off.  The arena grows by the requested size only, because torch
# allocates on the same GPU.  An exhaustive search for convolutions would be repeated in each of many short sessions.
_OPTIONS = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}


@dataclass(frozen=True, slots=True)
class Device:
    """One device and the execution providers on it.

    Attributes:
        kind: `cpu` or `cuda`, as ONNX Runtime's bindings and torch both call it.
        number: index among the GPUs visible to this process.
        names: execution providers, the preferred one first.
        memory: limit in bytes for ONNX Runtime's arena and for cached activations each on a GPU; None: no limit.
    """

    kind: str = "cpu"
    number: int = 0
    names: tuple[str, ...] = ("CPUExecutionProvider",)
    memory: int | None = None

    @property
    def place(self) -> str:
        """Return torch's name of the device."""
        return f"{self.kind}:{self.number}" if self.kind == "cuda" else self.kind

    @property
    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """Return the providers with their options for an ONNX Runtime session."""
        options = {"device_id": str(self.number), **_OPTIONS}
        if self.memory is not None:
            options["gpu_mem_limit"] = str(self.memory)
        return [(name, options) if name == CUDA else name for name in self.names]


def device_of(providers: Sequence[str]) -> Device:
    """Return the device of this process, one of those named by the user.

    `torchrun` numbers the processes of a machine: the first process takes the first named GPU, and so on; if no GPU was
    named, a process takes the GPU of its own number.

    Raises:
        UsageError: the text after a provider is not a list of numbers.
        DeviceError: there are more GPUs than processes, or more processes than GPUs.
    """
    words = [word.partition(":") for word in providers]
    names = tuple(dict.fromkeys(name for name, _, _ in words))
    if CUDA not in names:
        return Device(names=tuple(dict.fromkeys(providers)))
    text = next(text for name, _, text in words if name == CUDA)
    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise UsageError(f"{CUDA}:{text} does not name GPUs", hint="Write --device cuda:0 or cuda:0,1")
    return Device("cuda", _number([int(part) for part in text.split(",") if part]), names, _memory())


def _number(named: Sequence[int]) -> int:
    """Return the number of this process's GPU."""
    local, size = (int(os.environ.get(name) or default) for name, default in (("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")))
    if size == 1 and len(named) > 1:
        raise DeviceError(
            f"{len(named)} GPUs were named for one process",
            hint=f"Each takes a process of its own: torchrun --nproc-per-node {len(named)} -m onnxgrail compress ...",
        )
    if named and local >= len(named):
        raise DeviceError(
            f"process {local} of this machine has no GPU: {len(named)} were named",
            hint="Name one for each process, such as --device cuda:0,1, or start fewer",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # A scheduler may show each process only its own GPU.
    return named[local] if named else local % len(visible.split(",")) if visible else local


def _memory() -> int | None:
    text = os.environ.get(MEMORY, "").strip().upper()
    match = re.fullmatch(r"(\d+)([MG]?)I?B?", text)
    if text and match is None:
        raise UsageError(f"{MEMORY}={text} is no size", hint="Write 20G or 500M")
    return int(match[1]) * _UNITS[match[2]] if match else None
