"""Weights that stay in files: read on access, and passed to the runtime by file path and offset."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.errors import ModelError, OnnxGrailError, OutputError
from onnxgrail.machine.files.temporary import lasting
from onnxgrail.machine.files.unchanged import SteadyFile

ROOT = os.path.abspath(os.sep)  # noqa: PTH100  locations are relative to it: one folder that contains every file
LARGE = 2**16  # bytes; changed weights from this size on go to a file if the old ones were in a file

SOURCES = "onnxgrail.sources"  # key in a model's `meta`: the files that it was loaded from


class Mapped(ir.ExternalTensor):
    """A weight at an offset in a file.

    Arrays are read from the file on each access and not cached.  The location is the real path of the file relative to
    `ROOT`, so a model with weights in several folders can be run from memory.

    Attributes:
        file: the file that holds the weight.
        stated: the location as written in the model file; empty if the weight is not in an external data file.
        temporary: True if the file belongs to this tensor and is removed with it.
    """

    def __init__(
        self, file: SteadyFile, offset: int, tensor: ir.TensorProtocol, *, stated: str = "", temporary: bool = False
    ) -> None:
        """Map the data at `offset` with the type and shape of `tensor`."""
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
        """Read the numbers as a read-only array."""
        shape = self.shape.numpy()
        if self.size == 0:
            return np.empty(shape, dtype=self.dtype.numpy())
        if self.dtype.bitwidth < 8:  # several numbers in a byte
            packed = onnx.TensorProto(dims=shape, data_type=self.dtype.value, raw_data=self.tobytes())
            return np.asarray(ir.TensorProtoTensor(packed).numpy())
        return np.asarray(self._bytes().view(np.dtype(self.dtype.numpy()).newbyteorder("<")).reshape(shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Convert to a numpy array (numpy's array protocol)."""
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def tobytes(self) -> bytes:
        """Return a copy of the bytes in the file."""
        return self._bytes().tobytes() if self.size else b""

    def tofile(self, file: Any) -> None:
        """Write the bytes to an open file, piece by piece."""
        for piece in self.file.pieces(self.offset or 0, self.nbytes):
            file.write(piece)

    def _bytes(self) -> Array:
        found = np.empty(self.nbytes, np.uint8)  # unlike a bytearray, it is not zeroed first
        self.file.read_into(self.offset or 0, found.data)
        found.flags.writeable = False
        return found


def map_weights(model: ir.Model, path: Path | None, label: str) -> None:
    """Replace every reference to external data by a `Mapped` tensor, in place.

    Args:
        model: the parsed model.
        path: path of the model file; None if the model was given in memory.
        label: name of the model in error messages.

    Raises:
        ModelError: external data is missing, truncated, or outside the model's folder.
    """
    files: dict[Path, SteadyFile] = {}
    for value, given in weights_of(model):
        if isinstance(given, ir.ExternalTensor):
            value.const_value = _mapped(given, path, label, files)
    for graph in model.graphs():
        for node in graph:
            for name, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    tensor = _mapped(attribute.value, path, label, files)
                    node.attributes[name] = ir.AttrTensor(name, in_memory(tensor))
    held = {t.file: None for _, t in weights_of(model) if isinstance(t, Mapped) and not t.temporary}
    model.meta[SOURCES] = tuple(held)


def _mapped(
    tensor: ir.ExternalTensor, model: Path | None, label: str, files: dict[Path, SteadyFile]
) -> ir.TensorProtocol:
    """Return an external tensor as a `Mapped` one, after checking its location.

    A model file must not reach files outside its folder: absolute locations and `..` are refused.  Links are refused
    too, since an archive may have brought them, unless they lead to the folder of the real model file: in the cache of
    a model hub, model and data are both links into one folder.
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
    except (OSError, ValueError, RuntimeError):  # path too long, a zero byte, circular links
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
    except ValueError:  # on another Windows drive: no relative path leads there
        raw = b"".join(map(bytes, file.pieces(offset, tensor.nbytes)))
        whole = onnx.TensorProto(
            name=tensor.name, dims=tensor.shape.numpy(), data_type=tensor.dtype.value, raw_data=raw
        )
        return ir.TensorProtoTensor(whole)


def like(old: ir.TensorProtocol | None, new: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return new numbers for a weight, in a temporary file if the numbers they replace were in a file.

    The temporary file is removed with the tensor.  It keeps its name until then: the runtime resolves the real path of
    external data when a session is opened, and cannot resolve /proc/self/fd.  If no file can be created, the numbers
    stay in memory.
    """
    if not isinstance(old, Mapped) or new.nbytes < LARGE:
        return new
    path: Path | None = None
    try:
        handle, name = tempfile.mkstemp(suffix=".weight", dir=lasting())
        path = Path(name).resolve()
        with os.fdopen(handle, "wb") as file:
            write(new, file)
        return Mapped(SteadyFile(path, ModelError), 0, new, temporary=True)
    except (OSError, ValueError, OutputError):
        _remove(path)
        return new


def discard(model: ir.Model) -> None:
    """Remove the temporary files of a model that will not be written; open sessions keep their data.

    Otherwise they would stay until Python's garbage collector frees the model.
    """
    for _, tensor in weights_of(model):
        if os.name == "posix" and isinstance(tensor, Mapped) and tensor.temporary:
            _remove(Path(tensor.path))


def keep(model: ir.Model) -> ir.Model:
    """Exempt the temporary files of a model from `discard`, which copies of it then do not remove; return the model."""
    for _, tensor in weights_of(model):
        if isinstance(tensor, Mapped):
            tensor.temporary = False
    return model


def in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return the weight as a tensor that does not depend on a file."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.Tensor(tensor.numpy().copy(), **fields(tensor))


def fields(tensor: ir.TensorProtocol) -> dict[str, Any]:
    """Return the type, shape, name and metadata of a weight, as keyword arguments for tensor constructors."""
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
    """Return the external data files of a model: location as written in the model -> path."""
    return {t.stated: Path(t.path) for _, t in weights_of(model) if isinstance(t, Mapped) and t.stated}


def check_unchanged(model: ir.Model) -> None:
    """Check that the files of a model have not changed since it was loaded.

    Raises:
        ModelError: a file changed: parts that were read before and after may not belong together.
    """
    for file in model.meta.get(SOURCES, ()):
        file.check()


@contextlib.contextmanager
def unchanged(model: ir.Model) -> Iterator[None]:
    """Report a changed model file instead of the error that the change caused.

    Raises:
        ModelError: as `check_unchanged`.
    """
    try:
        yield
    except OnnxGrailError:
        check_unchanged(model)
        raise


def in_files(model: ir.Model) -> bool:
    """Return True if any weights of a model are in files: external data or the model file itself."""
    return any(isinstance(tensor, Mapped) for _, tensor in weights_of(model))


def loose(model: ir.Model) -> ir.Model:
    """Replace weights that are mapped from the model file itself by lazy tensors, in place, and return the model."""
    for value, tensor in weights_of(model):
        if isinstance(tensor, Mapped) and not tensor.stated:
            value.const_value = ir.LazyTensor(partial(in_memory, tensor), **fields(tensor))
    return model


def weights_of(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield the initializers of all graphs, bodies of nodes included, with their tensors."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value, value.const_value


def _remove(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()
