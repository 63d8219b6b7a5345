"""The two exporters of torch: each writes a draft, or raises the reason why it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from onnxgrail.errors import OnnxGrailError, OutputError, first_cause
from onnxgrail.exporting.subject import Subject, Tensor, caller, quiet, torch
from onnxgrail.graph.io import model_file
from onnxgrail.machine.files.temporary import out_of_room

EXPORTERS = ("dynamo", "torchscript")
ATTENTIONS = ("eager", "sdpa")
NEWEST = {"torchscript": 20}  # newest opset of an exporter


class NotWritten(OnnxGrailError):  # noqa: N818  a failed attempt, after which others follow
    """An exporter could not write a module."""


def write(
    subject: Subject, path: Path, *, exporter: str, opset: int, outputs: Mapping[str, Tensor], external: bool
) -> None:
    """Write a draft.

    Args:
        subject: the module.
        path: the draft file, in a folder of its own.
        exporter: name of the exporter.
        opset: opset of the file.
        outputs: torch's outputs, for the names.
        external: write weights to a separate file, even if they fit into the model file.

    Raises:
        NotWritten: the exporter fails, or writes another opset.
        OutputError: the disk is full.
    """
    if opset > NEWEST.get(exporter, opset):
        raise NotWritten(f"it knows opsets up to {NEWEST[exporter]}")
    try:
        with _flattened(subject), quiet():
            _WRITERS[exporter](subject, path, opset, list(outputs), external)
    except Exception as error:
        full = out_of_room(error)
        if full is not None:  # every other attempt would fail too
            why = full.strerror or str(full)
            raise OutputError(f"cannot write {path.name}: {why}", hint="Choose another output folder") from error
        raise NotWritten(reason(error)) from error
    got = opset_of(path)
    if got != opset:
        raise NotWritten(f"it writes opset {got}, asked was {opset}")


def opset_of(path: Path) -> int:
    """Return the version of the standard operators in a file."""
    model = onnx.load(path, load_external_data=False)
    return max(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


@contextlib.contextmanager
def _flattened(subject: Subject) -> Iterator[None]:
    """Replace the module's `forward` by one with tensors in and out, so that weights keep their names."""
    module, call = subject.module, caller(subject)
    own = module.__dict__.get("forward")

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(*tensors).values())

    module.forward = forward
    fast = torch().backends.mha.get_fastpath_enabled()
    torch().backends.mha.set_fastpath_enabled(False)  # a fused operator that no exporter supports
    try:
        with torch().no_grad():
            yield
    finally:
        torch().backends.mha.set_fastpath_enabled(fast)
        del module.forward
        if own is not None:
            module.forward = own


def _called(subject: Subject, opset: int, names: list[str], *given: str, **more: Any) -> Any:
    """Call the exporter of torch."""
    tensors = tuple(subject.inputs.values())
    named = {"input_names": list(subject.inputs), "output_names": names}
    return torch().onnx.export(subject.module, tensors, *given, opset_version=opset, **named, **more)


def _dynamo(subject: Subject, path: Path, opset: int, names: list[str], external: bool) -> None:
    axes = tuple(dict(subject.axes.get(name, {})) or None for name in subject.inputs)
    shapes = (axes,) if any(axes) else None
    program = _called(subject, opset, names, dynamo=True, dynamic_shapes=shapes, verbose=False)
    apart = external or model_file.weight_bytes(program.model) > model_file.LIMIT
    program.save(str(path), external_data=apart)


def _torchscript(subject: Subject, path: Path, opset: int, names: list[str], external: bool) -> None:
    weights = sum(t.numel() * t.element_size() for t in subject.module.state_dict().values())
    apart = external or weights > model_file.LIMIT
    draft = path.with_name("loose") / path.name if apart else path  # over 2 GB it writes a file per weight
    draft.parent.mkdir(exist_ok=True)
    open_ = {name: dict(axes) for name, axes in subject.axes.items() if axes}
    _called(subject, opset, names, str(draft), dynamo=False, dynamic_axes=open_)
    if apart:
        model_file.save(model_file.load(draft), path, apart=True)


_WRITERS: dict[str, Callable[[Subject, Path, int, list[str], bool], None]] = {
    "dynamo": _dynamo,
    "torchscript": _torchscript,
}


def attentions(module: Any, wanted: str | None) -> tuple[str | None, ...]:
    """Return the attention implementations to try; plain products and softmax, which every opset has, come first."""
    if not hasattr(module, "set_attn_implementation"):
        return (None,)
    return (wanted,) if wanted else ATTENTIONS


def attend(module: Any, way: str | None) -> None:
    """Set the model's attention implementation.

    Raises:
        NotWritten: the model does not support it.
    """
    if way is None:
        return
    try:
        with quiet():
            module.set_attn_implementation(way)
    except Exception as error:
        raise NotWritten(f"no {way} attention: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the first nonempty line of the root cause."""
    error = first_cause(error)
    for line in str(error).splitlines():
        text = line.strip(" #-*")
        if text:
            return f"{type(error).__name__}: {text[:300]}"
    return type(error).__name__
