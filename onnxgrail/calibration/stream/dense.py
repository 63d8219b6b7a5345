"""Second moments of the original model's activations, computed in one pass and saved to a file.

They do not depend on ratio, selector or budget, so runs that differ only in those can reuse the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.parts import content
from onnxgrail.core import Block, Probe, Stats
from onnxgrail.errors import DataError
from onnxgrail.graph.io.serial import skeleton
from onnxgrail.machine.files.paths import write_whole

Dense = Mapping[str, tuple[Stats, ...]]
"""Block name -> statistics of its probes."""

TOGETHER = 2**31  # bytes of second moments collected in one pass
SAME = (
    "Data, --samples, --held-out, --batch-size and --seed must be as they were; without --held-out, --max-loss holds "
    "out other samples than --ratio"
)
FORMAT = 1
T = TypeVar("T")


def by_block(probes: Sequence[Sequence[Probe]], found: Sequence[Stats | None]) -> list[tuple[Stats, ...]]:
    """Split the statistics of the probes of several blocks by block; the tuples of other processes are empty."""
    left = iter(found)
    return [tuple(stats for stats in islice(left, len(some)) if stats is not None) for some in probes]


def size_of(block: Block) -> int:
    """Return the size of a block's second moments in bytes."""
    return sum(8 * probe.width**2 for probe in block.probes)


def grouped(items: Sequence[T], size: Callable[[T], int], together: int) -> list[list[T]]:
    """Split items into consecutive groups, each as large as fits.

    Args:
        items: in order.
        size: bytes that an item takes.
        together: bytes that a group may take; a single item may take more.
    """
    groups: list[list[T]] = []
    room = 0
    for item in items:
        taken = size(item)
        if not groups or taken > room:
            groups.append([])
            room = together
        groups[-1].append(item)
        room -= taken
    return groups


def model_key(model: ir.Model) -> str:
    """Return the SHA-256 checksum of a model with all its weights."""
    digest = hashlib.sha256(skeleton(model).SerializeToString(deterministic=True))
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            digest.update(value.const_value.tobytes())
    return digest.hexdigest()


def data_key(batches: Batches) -> str:
    """Return the SHA-256 checksum of all feeds."""
    digest = hashlib.sha256()
    for feed in batches:
        for name in sorted(feed):
            array = np.ascontiguousarray(feed[name])
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(content(array))
    return digest.hexdigest()


def labels_key(batches: Batches) -> str:
    """Return the SHA-256 checksum of the true classes of all samples; empty if the data have none."""
    digest = hashlib.sha256()
    for labels in batches.labels:
        digest.update(b"none" if labels is None else np.ascontiguousarray(labels.values, np.int64).tobytes())
    return digest.hexdigest() if batches.has_labels else ""


def save(path: Path, dense: Dense, blocks: Sequence[Block], model: ir.Model, batches: Batches) -> None:
    """Write statistics to a file, with checksums of the model and the data they belong to.

    Raises:
        OutputError: the file cannot be written.
    """
    entries: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for block in blocks:
        for probe, stats in zip(block.probes, dense[block.name], strict=True):
            number = len(entries)
            entries.append({"block": block.name, "probe": _name(probe), "count": stats.count})
            arrays[f"gram{number}"], arrays[f"total{number}"] = stats.gram, stats.total
    head = {"format": FORMAT, "model": model_key(model), "data": data_key(batches), "entries": entries}
    arrays["head"] = np.array(json.dumps(head))
    write_whole(path, lambda file: np.savez(file, **arrays))


def load(path: Path, blocks: Sequence[Block], model: ir.Model, batches: Batches) -> dict[str, tuple[Stats, ...]]:
    """Read the statistics of all `blocks` from a file written by `save`.

    Raises:
        DataError: the file is not a statistics file, belongs to another model or other data, or lacks a block.
    """
    if not path.is_file():
        raise DataError(f"no statistics file {str(path)!r}", hint="Make it with --save-stats")
    try:
        with np.load(path, allow_pickle=False) as file:
            return _read(file, str(path), blocks, model, batches)
    except DataError:
        raise
    except Exception as error:  # numpy, zipfile and Python's tokenizer raise many types
        raise DataError(f"{str(path)!r} holds no statistics: {error}", hint="Make it with --save-stats") from error


def _read(
    file: Any, label: str, blocks: Sequence[Block], model: ir.Model, batches: Batches
) -> dict[str, tuple[Stats, ...]]:
    head = json.loads(str(file["head"]))
    if head["format"] != FORMAT:
        raise DataError(f"{label!r} has format {head['format']}, expected {FORMAT}", hint="Create it again")
    for what, said, key, hint in (  # data first: a model in other bases of these data is another one, too
        ("data", "other data", data_key(batches), SAME),
        ("model", "another model", model_key(model), "Create them again with --save-stats"),
    ):
        if head[what] != key:
            why = f"checksum {head[what][:12]}, expected {key[:12]}"
            raise DataError(f"statistics {label!r} were made from {said}: {why}", hint=hint)
    places = {(e["block"], e["probe"]): (n, int(e["count"])) for n, e in enumerate(head["entries"])}
    found: dict[str, tuple[Stats, ...]] = {}
    for block in blocks:
        some = []
        for probe in block.probes:
            if (block.name, _name(probe)) not in places:
                raise DataError(
                    f"statistics {label!r} hold nothing about block {block.name}",
                    hint="Make the file with the same --blocks, --include, --exclude and --kv-io",
                )
            number, count = places[block.name, _name(probe)]
            some.append(_sums(file, number, count, probe))
        found[block.name] = tuple(some)
    return found


def _sums(file: Any, number: int, count: int, probe: Probe) -> Stats:
    """Read the statistics of one probe from the file.

    Raises:
        ValueError: the arrays do not have the shapes, dtype or finite values of such statistics.
    """
    gram, total, width = file[f"gram{number}"], file[f"total{number}"], probe.width
    shapes = {(width, width), (width,)} if probe.alone else {(width, width)}
    if gram.shape not in shapes or total.shape != (width,) or count < 1:
        found = f"{count} rows, products {list(gram.shape)} and sums {list(total.shape)}"
        raise ValueError(f"{found} for {width} channels of {probe.value!r}")
    if any(array.dtype not in (np.float32, np.float64) or not np.isfinite(array).all() for array in (gram, total)):
        raise ValueError(f"products or sums of {probe.value!r} are not finite numbers of float32 or float64")
    return Stats(gram=gram, total=total, count=count)


def _name(probe: Probe) -> str:
    """Return a text that identifies a probe, with a checksum of its channel indices."""
    index = hashlib.sha256(np.ascontiguousarray(probe.index).tobytes()).hexdigest()[:16]
    return f"{probe.value} axis {probe.axis} pooled {probe.pooled} also {','.join(probe.also)} index {index}"
