"""`onnxgrail.export`: attempts in a fixed order; the first file that agrees with torch is kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxgrail.calibration.runtime.session import runtime
from onnxgrail.errors import ModelError, UsageError
from onnxgrail.exporting import writers
from onnxgrail.exporting.agreement import Check, Trial, judge, trials
from onnxgrail.exporting.axes import BATCH, opened, outputs, without
from onnxgrail.exporting.sources import Wish, find
from onnxgrail.exporting.subject import Axes, Shapes, Subject, torch
from onnxgrail.exporting.writers import ATTENTIONS, EXPORTERS, NotWritten, attend, attentions, write
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.model_file import bytes_on_disk
from onnxgrail.machine.files import drafts
from onnxgrail.machine.files.paths import Read, check_output, check_targets, existing
from onnxgrail.machine.plain import Plain
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.machine.scripts import is_named

OPSET = 20  # the newest that both exporters write and that runs with any batch size
OLDEST = 9  # ONNX Runtime runs older opsets, but no exporter writes them well
RECORDED = (
    "written by torchscript, which records one run: where a branch depends on values, check it with your own data"
)
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Export(Plain):
    """An exported model.

    Attributes:
        output: the file.
        source: name of the exported model.
        exporter: `dynamo` or `torchscript`, whichever wrote it.
        attention: the attention implementation, for models of transformers.
        opset: of the file.
        inputs: per input, sizes of fixed axes and names of open axes.
        outputs: names.
        params: number of parameters.
        bytes: of the file, external data included.
        checks: comparisons with torch; empty without the check.
        notes: notes on assumptions, and failures of other attempts.
    """

    output: Path
    source: str
    exporter: str
    attention: str | None
    opset: int
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    params: int
    bytes: int
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def gates_passed(self) -> bool:
        """Return True if the file agrees with torch at every tested shape."""
        return all(check.passed for check in self.checks)

    def to_data(self) -> dict[str, Any]:
        """Return the result as plain data."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return Plain.to_data(self) | {"output": str(self.output), "checks": checks}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """An attempt."""

    exporter: str
    attention: str | None
    subject: Subject
    narrow: bool = False

    def __str__(self) -> str:
        attention = f" with {self.attention} attention" if self.attention else ""
        return f"{self.exporter}{attention}{', only the batch open,' if self.narrow else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    way: _Way
    path: Path
    checks: tuple[Check, ...]
    outputs: tuple[str, ...]


def export(
    source: Any,
    target: str | Path,
    *,
    inputs: Any = None,
    static: bool = False,
    dynamic: Axes | None = None,
    input_shapes: Shapes | None = None,
    opset: int = OPSET,
    dtype: str | None = None,
    exporter: str | None = None,
    attention: str | None = None,
    task: str | None = None,
    random_weights: bool = False,
    seed: int = 0,
    check: bool = True,
    tolerance: float | None = None,
    save_as_external_data: bool | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Export:
    """Export a torch module to ONNX, and compare the file with torch at several shapes.

    Args:
        source: a module, of which a copy is exported; `file.py:function`, which is run; `torchvision:NAME`,
            `timm:NAME-or-folder` or `transformers:NAME-or-folder`.
        target: the file to write.
        inputs: for a module: a tensor, several in the order of `forward`, or a mapping by name.
        static: fix all sizes to those of the example inputs.
        dynamic: names of open axes per input, in place of the guess (batch and sequence).
        input_shapes: shapes of random inputs.
        opset: version of the standard operators.
        dtype: `float32`, `float16` or `bfloat16`; None keeps the dtype, except that bfloat16 becomes float32.
        exporter: use only `dynamo` or only `torchscript`; None tries both in this order.
        attention: use only `eager` or only `sdpa`, for models of transformers; None tries both.
        task: task of a transformers model; None for the class that it was saved from.
        random_weights: use random weights for a hub's model.
        seed: seed of all random values.
        check: compare the file with torch.
        tolerance: maximum relative error of an output; None for 1e-3, or 3e-2 in half precision.
        save_as_external_data: write weights to a separate file; None: only over 2 GB, when it is required.
        force: replace an existing target.
        progress: called once per attempt.

    Returns:
        Export: `output`, the file; `exporter` and `attention`, what wrote it; `opset`, `inputs`, `outputs`, `params`,
            `bytes`; `checks`, comparisons with torch; and `notes`.

    Raises:
        UsageError: an option is out of range.
        MissingExtraError: torch or a hub's package is not installed.
        ModelError: there is no such model, its code raises, or no exporter can write it.
        OutputError: the target cannot be written.
    """
    limited = (("dtype", dtype, DTYPES), ("exporter", exporter, EXPORTERS), ("attention", attention, ATTENTIONS))
    for name, value, known in limited:
        if value is not None and value not in known:
            raise UsageError(f"{name} {value!r} is not known", hint=f"Choose from {', '.join(known)}")
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST <= opset <= newest:
        raise UsageError(f"opset {opset} is not between {OLDEST} and {newest}, the newest that onnx knows here")
    if static and dynamic:
        raise UsageError("static and dynamic axes contradict each other")
    path = Path(target)
    check_targets([("OUT", path)], _reads(source))
    check_output(path, force=force)
    torch()
    if check:
        runtime()  # reports a missing package before minutes of work
    wish = Wish(shapes=input_shapes or {}, task=task, random=random_weights, seed=seed)
    subject = _typed(find(source, inputs, wish), dtype)
    outputs(subject)  # fails here if torch cannot run the module at all
    subject = opened(subject, static=static, dynamic=dynamic)
    ways = list(_ways(subject, exporter, attention, guessed=dynamic is None))
    with drafts.draft(existing(path.parent)) as folder:

        def attempt(number: int) -> _Draft:
            progress("export", number, len(ways))
            place = folder / str(number)
            place.mkdir()
            return _draft(
                ways[number], place / path.name, opset, check, tolerance, external=bool(save_as_external_data)
            )

        draft, notes = _first(ways, attempt, subject.name)
        progress("export", len(ways), len(ways))
        return _finished(draft, path, subject.name, notes)


def _reads(source: Any) -> list[Read]:
    """Return the inputs of a source: a script, or the folder of a hub's model, in which models may be written."""
    spec = str(source) if isinstance(source, str | os.PathLike) else ""
    if is_named(spec):
        return [Read(path=Path(spec.rpartition(":")[0]), what="the input")]
    folder = spec.partition(":")[2]
    if not folder or not Path(folder).is_dir():
        return []
    return [Read(path=Path(folder), what="the model", holds=lambda file: file.suffix not in (".onnx", ".data"))]


def _ways(subject: Subject, exporter: str | None, attention: str | None, *, guessed: bool) -> Iterator[_Way]:
    """Yield attempts, the preferred one first; at last, if the axes are a guess, only the batch stays open."""
    tools = (exporter,) if exporter else EXPORTERS
    kinds = attentions(subject.module, attention)
    for tool in tools:
        for kind in kinds:
            yield _Way(exporter=tool, attention=kind, subject=subject)
    rest = [label for label in subject.labels() if label != BATCH]
    if rest and guessed:
        closed = without(subject, rest, "no file with open ones is right")
        for tool in tools:
            yield _Way(exporter=tool, attention=kinds[0], subject=closed, narrow=True)


def _first(ways: list[_Way], attempt: Callable[[int], _Draft], name: str) -> tuple[_Draft, list[str]]:
    """Return the first draft that passes its checks, else the first draft, and the failures of the others.

    Raises:
        ModelError: there is no draft.
    """
    kept: _Draft | None = None
    notes: list[str] = []
    for number, way in enumerate(ways):
        try:
            draft = attempt(number)
        except NotWritten as error:
            notes.append(f"{way} failed: {error}")
            continue
        failed = next((check for check in draft.checks if not check.passed), None)
        if failed is None:
            return draft, [*notes, *([RECORDED] if number and way.exporter == "torchscript" else [])]
        notes.append(f"{way} wrote a file that fails the check: {failed.told()}")
        kept = kept or draft
    if kept is None:
        open_ = ways and ways[0].subject.labels()
        hint = "Try --static" if open_ else "Try another --opset, or change the module"
        raise ModelError(f"{name} cannot be exported: {notes[0] if notes else 'no way'}", hint=hint)
    return kept, notes


def _draft(way: _Way, path: Path, opset: int, check: bool, tolerance: float | None, *, external: bool) -> _Draft:
    attend(way.subject.module, way.attention)
    runs: tuple[Trial, ...] = trials(way.subject)
    expected = runs[0].expected
    write(way.subject, path, exporter=way.exporter, opset=opset, outputs=expected, external=external)
    checks = judge(path, runs, tolerance) if check else ()
    return _Draft(way=way, path=path, checks=checks, outputs=tuple(expected))


def _finished(draft: _Draft, path: Path, name: str, notes: list[str]) -> Export:
    """Move a draft to the target; return the result."""
    subject = draft.way.subject
    model_file.move(draft.path, path)
    model = model_file.load(path)
    shapes = {
        key: tuple(subject.axes.get(key, {}).get(axis, int(size)) for axis, size in enumerate(tensor.shape))
        for key, tensor in subject.inputs.items()
    }
    return Export(
        output=path,
        source=name,
        exporter=draft.way.exporter,
        attention=draft.way.attention,
        opset=writers.opset_of(path),
        inputs=shapes,
        outputs=draft.outputs,
        params=counting.parameters(model),
        bytes=bytes_on_disk(model, path),
        checks=draft.checks,
        notes=(*subject.notes, *notes, *_unseen(subject, draft.checks)),
    )


def _unseen(subject: Subject, checks: tuple[Check, ...]) -> list[str]:
    """Return a note on open axes that had only one size in all runs."""
    sizes = {
        label: {check.shapes[name][axis] for check in checks}
        for name, axes in subject.axes.items()
        for axis, label in axes.items()
    }
    once = [label for label, found in sizes.items() if len(found) == 1]
    return [f"compared at one size only: {', '.join(once)} (torch ran no other that was tried)"] if once else []


def _typed(subject: Subject, dtype: str | None) -> Subject:
    """Return the subject in another floating-point dtype."""
    lib, notes = torch(), subject.notes
    held = {t.dtype for t in subject.module.state_dict().values() if t.is_floating_point()}
    if dtype is None and lib.bfloat16 not in held:
        return subject
    if dtype is None:
        dtype, notes = "float32", (*notes, "bfloat16 became float32, which runs everywhere; --dtype bfloat16 keeps it")
    kind = getattr(lib, dtype)
    changed = {name: t.to(kind) if t.is_floating_point() else t for name, t in subject.inputs.items()}
    return replace(subject, module=subject.module.to(kind), arguments={**subject.arguments, **changed}, notes=notes)
