"""Weights that lie in files: read when somebody looks at them, and named to the runtime by where they really are."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.errors import ModelError, OnnxGrailError
from onnxgrail.machine.files.unchanged import SteadyFile

ROOT = os.path.abspath(os.sep)  # noqa: PTH100  locations are written from here: one folder that holds every file
LARGE = 2**16  # bytes from which on a changed weight goes to a file where the old one lay in one

PIECE = 2**20  # bytes that are copied at once
SHELF = 2**20  # bytes from which on changed numbers wait in a file
SHELVED = 400  # arrays without a name that may be open at once: each takes a file descriptor
SOURCES = "onnxgrail.sources"  # key of a model's transient `meta`: the files that it was loaded from
_shelves: weakref.WeakValueDictionary[int, np.memmap[Any, Any]] = weakref.WeakValueDictionary()


class Mapped(ir.ExternalTensor):
    """A weight at a place in a file.

    An array that is handed out is read from the file, and its memory goes when it is dropped.  The location is the real
    file's, seen from `ROOT`, so a model with weights in several folders can be run from memory.

    Attributes:
        file: where it lies.
        stated: the location as the model file has it; empty where the weight lies in no file beside a model.
        temporary: the file is this very tensor's and goes with it.
    """

    def __init__(
        self, file: SteadyFile, offset: int, tensor: ir.TensorProtocol, *, stated: str = "", temporary: bool = False
    ) -> None:
        """Of a `tensor`'s type and shape."""
        super().__init__(
            os.path.relpath(file.path, ROOT),
            offset,
            tensor.nbytes,
            **fields(tensor),
            base_dir=ROOT,
        )
        self.file, self.stated, self.temporary = file, stated, temporary
        if temporary:
            weakref.finalize(self, _remove, file.path)

    def numpy(self) -> Array:
        """The numbers, read-only."""
        shape = self.shape.numpy()
        if self.size == 0:
            return np.empty(shape, dtype=self.dtype.numpy())
        if self.dtype.bitwidth < 8:  # several numbers in a byte
            packed = onnx.TensorProto(dims=shape, data_type=self.dtype.value, raw_data=self.tobytes())
            return np.asarray(ir.TensorProtoTensor(packed).numpy())
        return np.asarray(self._bytes().view(np.dtype(self.dtype.numpy()).newbyteorder("<")).reshape(shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """As numpy asks for it."""
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def tobytes(self) -> bytes:
        """A copy of the bytes in the file."""
        return self._bytes().tobytes() if self.size else b""

    def tofile(self, file: Any) -> None:
        """Write the bytes to an open file; they are never all in memory."""
        for piece in self.file.pieces(self.offset or 0, self.nbytes):
            file.write(piece)

    def _bytes(self) -> Array:
        found = np.empty(self.nbytes, np.uint8)  # unlike a bytearray it is not written before it is read into
        self.file.read_into(self.offset or 0, found.data)
        found.flags.writeable = False
        return found


def map_weights(model: ir.Model, path: Path | None, label: str) -> None:
    """Replace every reference to external data by a `Mapped`.

    Args:
        model: as it was parsed.
        path: that the user gave; None where there is none.
        label: what to call the model.

    Raises:
        ModelError: data are missing, truncated, or outside the folder.
    """
    files: dict[Path, SteadyFile] = {}
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _mapped(value.const_value, path, label, files)
        for node in graph:
            for name, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    tensor = _mapped(attribute.value, path, label, files)
                    node.attributes[name] = ir.AttrTensor(name, in_memory(tensor))
    held = {t.file: None for t in _tensors(model) if isinstance(t, Mapped) and not t.temporary}
    model.meta[SOURCES] = tuple(held)


def _mapped(
    tensor: ir.ExternalTensor, model: Path | None, label: str, files: dict[Path, SteadyFile]
) -> ir.TensorProtocol:
    """Where the data of a tensor are.

    A model must not reach out of its folder by what it says, so absolute locations and `..` are refused, and so are
    links, which an archive may have brought, unless they lead to where the model file itself really is: in the cache
    of a model hub both are links to one folder.
    """
    if isinstance(tensor, Mapped):
        return tensor
    location = os.fspath(tensor.location)
    base = model.parent if model is not None else (Path(tensor.base_dir) if tensor.base_dir else None)
    if base is None:
        raise ModelError(
            f"{label} keeps {tensor.name} in external data {location}", hint="Give the path of the model file"
        )
    if not location or Path(location).is_absolute() or ".." in Path(location).parts:
        raise ModelError(f"{label}: {tensor.name} points outside the model's folder ({location!r})")
    try:
        path = (base / location).resolve()
        found = path.is_file()
        inside = model is None or any(path.is_relative_to(p) for p in (base.resolve(), model.resolve().parent))
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links that go round
        found, inside = False, True
    if not inside:
        raise ModelError(
            f"{label}: {tensor.name} is a link that leads outside the model's folder ({location!r})",
            hint="Copy the file that it leads to beside the model",
        )
    if not found:
        raise ModelError(
            f"{label}: external data file {location} is missing from {base}",
            hint="Copy it beside the model; exporters write the weights there",
        )
    if not os.access(path, os.R_OK):
        raise ModelError(f"{label}: external data file {location} cannot be read", hint="Check its permissions")
    if path not in files:
        files[path] = SteadyFile(path, ModelError)
    file = files[path]
    offset, size = tensor.offset or 0, file.size
    if tensor.length is not None and tensor.length != tensor.nbytes:
        need = f"{tensor.length} bytes in {location}, its shape needs {tensor.nbytes}"
        raise ModelError(f"{label}: {tensor.name} has {need}")
    if offset < 0 or size < offset + tensor.nbytes:
        raise ModelError(
            f"{label}: external data file {location} is truncated ({size} of {offset + tensor.nbytes} bytes)"
        )
    try:
        return Mapped(file, offset, tensor, stated=location)
    except ValueError:  # on another drive than everything else: there is no way to name it from here
        raw = b"".join(map(bytes, file.pieces(offset, tensor.nbytes)))
        whole = onnx.TensorProto(
            name=tensor.name, dims=tensor.shape.numpy(), data_type=tensor.dtype.value, raw_data=raw
        )
        return ir.TensorProtoTensor(whole)


def like(old: ir.TensorProtocol | None, new: ir.TensorProtocol) -> ir.TensorProtocol:
    """New numbers, in a temporary file where those that they replace lay in a file.

    The file is removed with the tensor.  It needs a name as long as a session may be opened: the runtime looks for the
    real path of external data, and finds none behind /proc/self/fd once the name is gone.  So a run that is killed
    leaves the files of the model it was about to run.  Where no file can be made the numbers stay in memory.
    """
    if not isinstance(old, Mapped) or new.nbytes < LARGE:
        return new
    path: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix="onnxgrail-", suffix=".weight")
        path = Path(name).resolve()
        with os.fdopen(handle, "wb") as file:
            write(new, file)
        return Mapped(SteadyFile(path, ModelError), 0, new, temporary=True)
    except (OSError, ValueError):
        _remove(path)
        return new


def discard(model: ir.Model) -> None:
    """Remove the temporary files of a model that is not written: a session that has opened them keeps them.

    Otherwise they would stay until the model's cycles are collected.
    """
    for tensor in _tensors(model):
        if os.name == "posix" and isinstance(tensor, Mapped) and tensor.temporary:
            _remove(Path(tensor.path))


def shelved(array: Array) -> Array:
    """An array in a file without a name, which goes with it; small ones, and all where there is no room, stay."""
    if array.nbytes < SHELF or len(_shelves) >= SHELVED:
        return array
    try:
        with tempfile.TemporaryFile(prefix="onnxgrail-") as file:
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            raw: np.memmap[Any, Any] = np.memmap(file, dtype=np.uint8, mode="r")
            _shelves[id(raw)] = raw
    except OSError:
        return array
    return np.asarray(raw.view(array.dtype).reshape(array.shape))


def in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A weight that depends on no file."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.Tensor(tensor.numpy().copy(), **fields(tensor))


def fields(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """Return what a weight is beside its numbers, as the constructors of tensors take it."""
    return {
        "dtype": tensor.dtype,
        "shape": ir.Shape([int(size) for size in tensor.shape.numpy()]),
        "name": tensor.name or "",
        "doc_string": tensor.doc_string,
        "metadata_props": dict(tensor.metadata_props),
    }


def write(tensor: ir.TensorProtocol, file: Any) -> None:
    """Write the bytes of a tensor to an open file."""
    if isinstance(tensor, Mapped):
        tensor.tofile(file)
    elif tensor.dtype.bitwidth < 8 or isinstance(tensor, ir.StringTensor):
        file.write(tensor.tobytes())
    elif tensor.size:
        array = np.ascontiguousarray(tensor.numpy())
        kind = array.dtype.newbyteorder("<")
        file.write(array.astype(kind, copy=False).reshape(-1).view(np.uint8).data)


def weight_files(model: ir.Model) -> dict[str, Path]:
    """The files that hold a model's weights, by the location that the model states."""
    return {t.stated: Path(t.path) for t in _tensors(model) if isinstance(t, Mapped) and t.stated}


def check_unchanged(model: ir.Model) -> None:
    """Check that the files of a model are as they were when it was loaded.

    Raises:
        ModelError: one is not: what was read of it before and after may not belong together.
    """
    for file in model.meta.get(SOURCES, ()):
        file.check()


@contextlib.contextmanager
def unchanged(model: ir.Model) -> Iterator[None]:
    """Say that a file of a model has changed in place of what went wrong for that reason.

    Raises:
        ModelError: as `check_unchanged`.
    """
    try:
        yield
    except OnnxGrailError:
        check_unchanged(model)
        raise


def in_files(model: ir.Model) -> bool:
    """Whether some of a model's weights lie in files: beside it, or in its own."""
    return any(isinstance(tensor, Mapped) for tensor in _tensors(model))


def loose(model: ir.Model) -> ir.Model:
    """A model whose weights say where they lie only if that is a file beside the source: others are read when asked."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, Mapped) and not tensor.stated:
                value.const_value = _later(tensor)
    return model


def _later(tensor: Mapped) -> ir.TensorProtocol:
    return ir.LazyTensor(lambda: in_memory(tensor), **fields(tensor))


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol | None]:
    for graph in model.graphs():
        yield from (value.const_value for value in graph.initializers.values())


def _remove(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()
