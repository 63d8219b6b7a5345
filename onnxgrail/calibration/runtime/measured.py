"""Times of models on this machine that decide something: measured once, the same in every later run."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from onnxgrail.calibration.runtime.session import CPU, LIBRARIES, runtime
from onnxgrail.calibration.runtime.threads import count
from onnxgrail.calibration.runtime.timing import machine
from onnxgrail.core import Feed
from onnxgrail.graph.io.serial import Packed
from onnxgrail.machine.files import kept
from onnxgrail.machine.steps.codec import Codec

T = TypeVar("T")

FORMAT = 1  # of what is kept; another one if measuring changes
LONGEST = 1e9  # milliseconds: eleven days
FEW = 64  # elements of a constant that may set shapes, and so the time
PROCESSOR = ("flags", "Features", "stepping", "cache size", "CPU part")  # lines of /proc/cpuinfo beside the name
IDLE = ("metadata_props", "doc_string", "producer_name", "producer_version")  # fields that no kernel reads


def once(
    kind: str,
    sources: Sequence[Packed | bytes],
    feeds: Sequence[Feed],
    providers: Sequence[str],
    make: Callable[[], T],
    codec: Codec[T],
) -> T:
    """Return times that an earlier run measured on this machine, else measure and keep them.

    Args:
        kind: how they are measured.
        sources: the models; those of the same operators, shapes, types and attributes have the same times.
        feeds: what they run on; only shapes and types count.
        providers: the execution providers; times on others than the CPU are not kept.
        make: measures.
        codec: storage format of the times.
    """
    if providers[0] not in CPU:
        return make()
    about = {
        "format": FORMAT,
        "measured": kind,
        "runtime": runtime().__version__,
        "providers": list(providers),
        "libraries": [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in LIBRARIES.get()],
        "machine": f"{machine()}, {platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": count(),
        "models": [_model(source if isinstance(source, bytes) else source.data) for source in sources],
        "feeds": [_feed(feed) for feed in feeds],
    }
    return kept.once(about, make, codec)


def duration(stored: Any) -> float:
    """Return stored milliseconds.

    Raises:
        ValueError: they are negative, or longer than any run.
    """
    ms = float(stored)
    if not 0 <= ms < LONGEST:
        raise ValueError(f"{ms} is no duration")
    return ms


def _processor() -> str:
    """Return a checksum of what the processor can do; of nothing if the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.partition(":")[0].strip() in PROCESSOR]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _model(data: bytes) -> str:
    """Return a checksum of a model without the numbers of its weights, and without notes in it."""
    proto = onnx.ModelProto.FromString(data)
    for one in (proto, proto.graph, *proto.graph.node):
        for name in IDLE:
            if name in one.DESCRIPTOR.fields_by_name:
                one.ClearField(name)
    for tensor in proto.graph.initializer:
        if np.prod(tensor.dims) > FEW or tensor.data_location == onnx.TensorProto.EXTERNAL:
            bare = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            tensor.CopyFrom(bare)
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def _feed(feed: Feed) -> Mapping[str, Any]:
    arrays = {name: np.asarray(array) for name, array in sorted(feed.items())}
    return {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
