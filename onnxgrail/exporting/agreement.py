"""Comparison of an exported draft with torch, at two or more shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.runtime.session import Session, open_session
from onnxgrail.core import Array
from onnxgrail.errors import ModelError
from onnxgrail.exporting.axes import BATCH, is_mask, other, outputs, resized, runs, sizes
from onnxgrail.exporting.subject import Subject, Tensor, torch
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.serial import runs_as_is, to_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The comparison of a run of the file with a run in torch.

    Attributes:
        what: how its inputs differ from the example.
        shapes: of the inputs.
        output: the output with the largest error, or the output that could not be computed.
        error: norm of the difference relative to the norm of torch's output; None if it could not be computed.
        limit: limit of the error.
        reason: why there is no error value.
    """

    what: str
    shapes: Mapping[str, tuple[int, ...]]
    output: str
    error: float | None
    limit: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Return True if the file agrees with torch."""
        return self.error is not None and self.error <= self.limit

    def told(self) -> str:
        """Return the failure in a line."""
        shapes = ", ".join(f"{name}{list(shape)}" for name, shape in self.shapes.items())
        what = self.reason or f"relative error {self.error:.1e} of {self.output!r} is above {self.limit:g}"
        return f"{what} (on {shapes})"


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs, how they differ from the example, and torch's outputs for them."""

    subject: Subject
    what: str
    expected: Mapping[str, Tensor]


def trials(subject: Subject) -> tuple[Trial, ...]:
    """Run torch on the example, on other values, on other sizes of all open axes, and on a batch of one.

    Other values reveal what a tracing exporter wrongly recorded as a constant.

    Raises:
        ModelError: torch cannot run the module.
    """
    first = Trial(subject, "the example", outputs(subject))
    labels = tuple(subject.labels())
    found = {"other numbers": _turned(subject), "other sizes": other(subject, labels, doubled=True) if labels else None}
    if sizes(subject).get(BATCH, 1) > 1:
        found["one sample"] = replace(subject, arguments=resized(subject, {BATCH: 1}))
    return (first, *(Trial(s, what, outputs(s)) for what, s in found.items() if s is not None and runs(s)))


def _turned(subject: Subject) -> Subject:
    """Return the subject with other values of the same shapes; floats change their sign, too."""
    changed = dict(subject.arguments)
    for name, tensor in subject.inputs.items():
        if tensor.ndim and not is_mask(tensor):
            changed[name] = -tensor.flip(-1) if tensor.is_floating_point() else tensor.flip(-1)
    return replace(subject, arguments=changed)


def judge(path: Path, trials: tuple[Trial, ...], tolerance: float | None) -> tuple[Check, ...]:
    """Run a draft on the inputs of all trials and compare with torch.

    Args:
        path: the draft.
        trials: runs in torch.
        tolerance: limit of the relative error; None for the default of the dtype.
    """
    try:
        model = model_file.load(path)
        session = open_session(path if runs_as_is(model) else to_bytes(model))
    except ModelError as error:
        return (_failed(trials[0], str(error)),)
    with session:
        return tuple(_check(session, trial, tolerance) for trial in trials)


def _check(session: Session, trial: Trial, tolerance: float | None) -> Check:
    from onnxgrail.torchgraph.program import LIMIT, distance  # that folder imports torch

    feed = {name: as_array(tensor) for name, tensor in trial.subject.inputs.items()}
    try:
        got = session.run(feed)
    except ModelError as error:
        return _failed(trial, str(error))
    worst: Check | None = None
    for name, expected in trial.expected.items():
        found, wanted = got.get(name), as_array(expected)
        if found is None or found.shape != wanted.shape:
            shape = "nothing" if found is None else f"shape {list(found.shape)}"
            return _failed(trial, f"{name!r}: got {shape}, expected {list(wanted.shape)}", name)
        size = min(expected.element_size(), 4)
        limit = (LIMIT[size] if tolerance is None else tolerance) if expected.is_floating_point() else 0.0
        gap = distance(found.astype(np.float64), wanted.astype(np.float64))
        check = Check(what=trial.what, shapes=_shapes(trial), output=name, error=gap, limit=limit)
        if worst is None or (check.passed, -gap) < (worst.passed, -(worst.error or 0.0)):
            worst = check
    return worst or _failed(trial, "no output")


def as_array(tensor: Any) -> Array:
    """Return a tensor as an array; bfloat16, which numpy lacks, as float32."""
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.float() if tensor.dtype == torch().bfloat16 else tensor).numpy())


def _shapes(trial: Trial) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, tensor.shape)) for name, tensor in trial.subject.inputs.items()}


def _failed(trial: Trial, why: str, output: str = "") -> Check:
    return Check(what=trial.what, shapes=_shapes(trial), output=output, error=None, limit=0.0, reason=why)
