"""The two exporters of torch: each writes one draft, or says in a line why it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from onnxgrail.errors import OnnxGrailError, OutputError
from onnxgrail.exporting.subject import Subject, Tensor, caller, quiet, torch
from onnxgrail.graph.io import model_file
from onnxgrail.machine.files.temporary import out_of_room

EXPORTERS = ("dynamo", "torchscript")
ATTENTIONS = ("eager", "sdpa")
NEWEST = {"torchscript": 20}  # opsets that an exporter does not know


class NotWritten(OnnxGrailError):  # noqa: N818  one of several attempts
    """An exporter could not write a module."""


def write(
    subject: Subject, path: Path, *, exporter: str, opset: int, outputs: Mapping[str, Tensor], external: bool
) -> None:
    """Write a draft.

    Args:
        subject: the module.
        path: in a folder of its own.
        exporter: which one.
        opset: that the file must have.
        outputs: what torch computes, for the names.
        external: weights beside the model, also where they would fit into it.

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
        if full is not None:  # no other way would fare better
            why = full.strerror or str(full)
            raise OutputError(f"cannot write {path.name}: {why}", hint="Choose another output folder") from error
        raise NotWritten(reason(error)) from error
    got = opset_of(path)
    if got != opset:
        raise NotWritten(f"it writes opset {got}, asked was {opset}")


def opset_of(path: Path) -> int:
    """Version of the standard operators in a file."""
    model = onnx.load(path, load_external_data=False)
    return max(int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


@contextlib.contextmanager
def _flattened(subject: Subject) -> Iterator[None]:
    """Tensors in, tensors out: the module itself, so that its weights keep their names, with another `forward`."""
    module, call = subject.module, caller(subject)
    own = module.__dict__.get("forward")

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(*tensors).values())

    module.forward = forward
    fast = torch().backends.mha.get_fastpath_enabled()
    torch().backends.mha.set_fastpath_enabled(False)  # one operator that no exporter knows
    try:
        with torch().no_grad():
            yield
    finally:
        torch().backends.mha.set_fastpath_enabled(fast)
        del module.forward
        if own is not None:
            module.forward = own


def _dynamo(subject: Subject, path: Path, opset: int, names: list[str], external: bool) -> None:
    axes = tuple(dict(subject.axes.get(name, {})) or None for name in subject.inputs)
    program = torch().onnx.export(
        subject.module,
        tuple(subject.inputs.values()),
        dynamo=True,
        opset_version=opset,
        input_names=list(subject.inputs),
        output_names=names,
        dynamic_shapes=(axes,) if any(axes) else None,
        verbose=False,
    )
    apart = external or model_file.weight_bytes(program.model) > model_file.LIMIT
    program.save(str(path), external_data=apart)


def _torchscript(subject: Subject, path: Path, opset: int, names: list[str], external: bool) -> None:
    weights = sum(t.numel() * t.element_size() for t in subject.module.state_dict().values())
    apart = external or weights > model_file.LIMIT
    draft = path.with_name("loose") / path.name if apart else path  # over 2 GB it writes a file for each weight
    draft.parent.mkdir(exist_ok=True)
    torch().onnx.export(
        subject.module,
        tuple(subject.inputs.values()),
        str(draft),
        dynamo=False,
        opset_version=opset,
        input_names=list(subject.inputs),
        output_names=names,
        dynamic_axes={name: dict(axes) for name, axes in subject.axes.items() if axes},
    )
    if apart:
        model_file.save(model_file.load(draft), path, apart=True)


_WRITERS: dict[str, Callable[[Subject, Path, int, list[str], bool], None]] = {
    "dynamo": _dynamo,
    "torchscript": _torchscript,
}


def attentions(module: Any, wanted: str | None) -> tuple[str | None, ...]:
    """Ways to compute attention that are worth a try: plain products and a softmax first, which every opset has."""
    if not hasattr(module, "set_attn_implementation"):
        return (None,)
    return (wanted,) if wanted else ATTENTIONS


def attend(module: Any, way: str | None) -> None:
    """Let a model compute attention in this way.

    Raises:
        NotWritten: it cannot.
    """
    if way is None:
        return
    try:
        with quiet():
            module.set_attn_implementation(way)
    except Exception as error:
        raise NotWritten(f"no {way} attention: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The first line that says something, of what was raised first."""
    while error.__cause__ is not None:
        error = error.__cause__
    for line in str(error).splitlines():
        text = line.strip(" #-*")
        if text:
            return f"{type(error).__name__}: {text[:300]}"
    return type(error).__name__
