"""Load and save models, with inline or external data. Files are written completely or not at all."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.errors import ModelError, OnnxGrailError, OutputError, first_cause
from onnxgrail.graph.attributes import HALVES
from onnxgrail.graph.flatten.activations import unfuse
from onnxgrail.graph.flatten.functions import inlined
from onnxgrail.graph.flatten.sequences import unpack
from onnxgrail.graph.io.inside import Split, hold, split
from onnxgrail.graph.io.mapped import SOURCES, Mapped, check_unchanged, map_weights, weight_files
from onnxgrail.graph.io.opaque import attach, set_aside
from onnxgrail.graph.io.serial import INFORMED
from onnxgrail.graph.io.soundness import STANDARD, check, tensors
from onnxgrail.graph.io.writing import unload, write_inline
from onnxgrail.machine.files import drafts
from onnxgrail.machine.files.paths import make_folder
from onnxgrail.machine.files.placing import Weights, place, sha256, weights_name
from onnxgrail.machine.files.temporary import TEMPORARY
from onnxgrail.machine.files.unchanged import SteadyFile

HEAVY = 2**30  # bytes of weights; larger models are run without making optimized copies of them

Source = Any  # str | Path | bytes | onnx.ModelProto | onnx_ir.Model
PROTOBUF = 2**31 - 1  # bytes of the largest protobuf message
LIMIT = 2**31 - 2**20  # a protobuf message ends at 2 GiB; leave room for the graph itself
OTHERS = (
    (4, b"ORTM", "It is in ORT format: give the .onnx file that it was made from"),
    (4, b"TFL3", "It is a TFLite model: convert it first, for example with tf2onnx"),
    (
        0,
        b"PK\x03\x04",
        "It is an archive, as torch and Keras save models: write ONNX first, see `onnxgrail export`",
    ),
    (0, b"\x89HDF", "It is an HDF5 file, as Keras saves models: convert it first, for example with tf2onnx"),
    (0, b"version https://git-lfs", "It is a pointer of Git LFS: fetch the file itself with `git lfs pull`"),
)  # files that are taken for models: offset, bytes there, and what to do


def load(source: Source) -> ir.Model:
    """Read a model; external data stays on disk and is mapped, and local functions are inlined.

    Sequences that only hold the pieces of a split are replaced by a Split node, and activations that are fused into
    layers become nodes.

    Raises:
        ModelError: not an ONNX model, truncated, external data missing or outside the model's folder, sparse weights.
    """
    try:
        model = inlined(_standard(_read(source)))
    except (OnnxGrailError, MemoryError, OSError):
        raise
    except Exception as error:  # onnx-ir raises many exception types
        raise ModelError(f"the model holds an inconsistent graph: {_brief(error)}") from error
    held = sum(t.nbytes for t in _weights(model) if not isinstance(t, Mapped))
    if held > PROTOBUF:
        raise _too_large("the given model", held)
    unpack(model)
    unfuse(model)
    return model


def _read(source: Source) -> ir.Model:
    if isinstance(source, ir.Model):
        model = copy(source)
        map_weights(model, None, "the given model")
        return model
    if isinstance(source, (str, Path)):
        return _from_path(Path(source))
    if isinstance(source, bytes):
        return _from_proto(_parse(source, "the given bytes"), "the given bytes")
    if isinstance(source, onnx.ModelProto):
        return _from_proto(source, "the given model")
    raise ModelError(
        f"cannot read a model from {type(source).__name__}", hint="Give a path, bytes, a ModelProto or a graph"
    )


def _standard(model: ir.Model) -> ir.Model:
    """Call the domain of the standard operators only by the empty name, as onnx-ir does in nodes."""
    for versions in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if STANDARD in versions:
            versions.setdefault("", versions.pop(STANDARD))
    return model


def _from_path(path: Path) -> ir.Model:
    if path.is_dir():
        raise ModelError(f"{path} is a folder, expected an ONNX file")
    try:
        status = path.stat()
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise ModelError(f"{path} is a device, expected an ONNX file")  # reading some devices never ends
        size = status.st_size
        if size > PROTOBUF:
            raise _too_large(str(path), size)
        file = SteadyFile(path.resolve(), ModelError)
        apart = split(path)
        data = path.read_bytes() if apart is None else apart.rest
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    model = _from_proto(_parse(data, str(path)), str(path), path, apart)
    model.meta[SOURCES] = (file, *model.meta[SOURCES])
    return model


def beside(source: Source) -> list[Path]:
    """Return the external data files that a model names; empty if the model is a file that cannot be read."""
    if isinstance(source, ir.Model):
        return sorted({Path(t.path) for t in _weights(source) if isinstance(t, ir.ExternalTensor)})
    if not isinstance(source, str | Path):
        return []
    path = Path(source)
    try:
        if not path.is_file() or path.stat().st_size > PROTOBUF:
            return []
        apart = split(path)
        proto = _parse(path.read_bytes() if apart is None else apart.rest, str(path))
        named = {e.value for t in tensors(proto) for e in t.external_data if e.key == "location"}
    except (ModelError, OSError, RecursionError):
        return []
    return [path.parent / name for name in sorted(named - {"."})]  # "." stands for the model file, see `split`


def _too_large(label: str, size: int) -> ModelError:
    hint = "Save it with external data (onnx.save(..., save_as_external_data=True)) and give the path of the file"
    return ModelError(f"{label} holds {size / 2**30:.1f} GiB, and a message of ONNX ends at 2 GiB", hint=hint)


def _parse(data: bytes, label: str) -> onnx.ModelProto:
    found = (told for start, first, told in OTHERS if data.startswith(first, start))
    hint = next(found, "Check that the file is complete and was exported as ONNX")
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except Exception as error:  # the protobuf backends raise different types
        raise ModelError(f"{label} is not an ONNX model, or is truncated", hint=hint) from error
    if not proto.ir_version or not proto.opset_import or not proto.HasField("graph"):
        raise ModelError(f"{label} is not an ONNX model (no graph or opset in it)", hint=hint)
    return proto


def _from_proto(proto: onnx.ModelProto, label: str, path: Path | None = None, apart: Split | None = None) -> ir.Model:
    if proto.graph.sparse_initializer:
        raise ModelError(f"{label} has sparse weights, which are not supported", hint="Store them dense first")
    if not proto.graph.node:
        raise ModelError(f"{label} has a graph without nodes")
    check(proto, label)
    plain, types = set_aside(proto, label)
    try:
        model = ir.from_proto(plain)
    except Exception as error:
        raise ModelError(f"{label} holds an inconsistent graph: {_brief(error)}") from error
    attach(model.graph.outputs, types)
    model.meta[INFORMED] = frozenset(info.name for info in proto.graph.value_info)
    if apart is not None and path is not None:
        hold(model, apart, path)
    map_weights(model, path, label)
    if not _sorted(model.graph):
        model.graph.sort()
    return model


def _sorted(graph: ir.Graph) -> bool:
    """Return True if every node, including those in bodies, comes after the nodes whose outputs it reads."""
    seen: set[ir.Node] = set()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        producers = (value.producer() for value in node.inputs if value is not None)
        if not all(producer is None or producer in seen for producer in producers):
            return False
        seen.add(node)
    return True


def weight_bytes(model: ir.Model) -> int:
    """Return the size of all initializers in bytes."""
    return sum(tensor.nbytes for tensor in _weights(model))


def running_bytes(model: ir.Model) -> int:
    """Return the bytes of all initializers as a CPU computes with them: half precision takes 4 bytes a number."""
    return sum(tensor.nbytes * (2 if tensor.dtype in HALVES else 1) for tensor in _weights(model))


def external(model: ir.Model, asked: bool | None) -> bool:
    """Return True if the result must have external data: as `asked`, or if None as the model has it."""
    return bool(weight_files(model)) or weight_bytes(model) > LIMIT if asked is None else asked


def _weights(model: ir.Model) -> list[ir.TensorProtocol]:
    return [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]


def copy(model: ir.Model) -> ir.Model:
    """Return a copy of a model that can be changed; weights are shared until they are replaced."""
    clone = model.clone()
    clone.meta.update(model.meta)
    return clone


def save(
    model: ir.Model,
    path: Path,
    *,
    apart: bool = False,
    scratch: Path | None = None,
    sources: Iterable[ir.Model] = (),
) -> dict[Path, str]:
    """Write the model; weights go to a file beside it if asked or if they exceed 2 GiB.

    The weights file is called `NAME.CHECKSUM.data`.  Files are written in a hidden folder beside the target (or in
    `scratch`) and then moved, so a failed save leaves the previous model in place.  Weights are copied one at a time.

    Args:
        model: the graph.
        path: where to write it.
        apart: write the weights to a file of their own.
        scratch: folder where files are written first; must be on the same file system as `path`.
        sources: models whose weights the result uses; their files must not have changed.

    Returns:
        Path -> checksum of each file, the model first.

    Raises:
        OutputError: the folder cannot be written.
        ModelError: a source file has changed.
    """
    apart = apart or weight_bytes(model) > LIMIT
    make_folder(path.parent)
    try:
        with drafts.draft(scratch or path.parent) as folder:
            whole = copy(model)
            weights = unload(whole, folder / "weights", partial(weights_name, path)) if apart else None
            digests = {path: write_inline(whole, folder / "model")}
            for source in sources:
                check_unchanged(source)
            place(path, folder / "model", weights)
        drafts.clear(path.parent)
        return digests if weights is None else digests | {path.parent / weights.name: weights.sha256}
    except OSError as error:
        on_the_way = path.parent.parent.name.startswith(drafts.SCRATCH)
        hint = TEMPORARY if on_the_way else "Choose another output folder"
        raise OutputError(f"cannot write {path}: {error.strerror or error}", hint=hint) from error


def move(draft: Path, path: Path) -> None:
    """Move a model written by another tool, with at most one external data file, to its place, as `save` does.

    Raises:
        OutputError: the folder cannot be written.
    """
    make_folder(path.parent)
    files = beside(draft)
    try:
        drafts.clear(path.parent)
        if not files:
            place(path, draft)
            return
        (file,), digest = files, sha256(files[0])
        weights = Weights(path=file, name=weights_name(path, digest), sha256=digest)
        proto = onnx.load(draft, load_external_data=False)
        for entry in (entry for tensor in tensors(proto) for entry in tensor.external_data if entry.key == "location"):
            entry.value = weights.name
        draft.write_bytes(proto.SerializeToString())
        place(path, draft, weights)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def _brief(error: BaseException) -> str:
    return " ".join(str(first_cause(error)).split())[:200]


def bytes_on_disk(model: ir.Model, path: Path) -> int:
    """Return the size of the model file and its external data files in bytes."""
    return sum(file.stat().st_size for file in (path, *weight_files(model).values()) if file.exists())
