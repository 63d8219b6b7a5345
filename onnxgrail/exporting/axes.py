"""Open axes of example inputs: guessed, tested in torch with other sizes, and resized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxgrail.errors import ModelError, UsageError
from onnxgrail.exporting.subject import Axes, Subject, Tensor, caller, torch

BATCH, SEQUENCE = "batch", "sequence"
GROWTH = {BATCH: 1}  # growth of the second size
STEP = 3  # growth of all other axes: not a multiple of usual sizes


def guess(inputs: Mapping[str, Tensor]) -> Axes:
    """Guess the open axes: the batch if all first axes agree, and the sequence of 2-D integers and 3-D inputs."""
    sizes = {tensor.shape[0] for tensor in inputs.values() if tensor.ndim}
    if len(sizes) != 1:
        return {}
    lengths: dict[int, str] = {}
    found: dict[str, dict[int, str]] = {}
    for name, tensor in inputs.items():
        if not tensor.ndim:
            continue
        found[name] = {0: BATCH}
        if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point()):
            label = SEQUENCE if not lengths else f"{SEQUENCE}_{len(lengths)}"
            found[name][1] = lengths.setdefault(int(tensor.shape[1]), label)
    return found


def opened(subject: Subject, *, static: bool, dynamic: Axes | None) -> Subject:
    """Return the subject with the axes that can stay open.

    Axes of size one grow to two, since exporters treat size one as a constant.  A guess is tested in torch: axes that
    it cannot run in other sizes are closed.

    Args:
        subject: the subject.
        static: close all axes.
        dynamic: names of open axes per input, in place of the guess.

    Raises:
        UsageError: `dynamic` names an input or axis that does not exist.
    """
    if static:
        return replace(subject, axes={})
    wanted = {name: dict(axes) for name, axes in (subject.axes or guess(subject.inputs)).items()}
    for name, axes in (dynamic or {}).items():
        if name not in subject.inputs:
            raise UsageError(f"no input {name!r}", hint=f"There are {', '.join(subject.inputs)}")
        rank = subject.inputs[name].ndim
        if any(not 0 <= axis < rank for axis in axes):
            raise UsageError(f"input {name!r} has axes 0 to {rank - 1}, not {', '.join(map(str, axes))}")
        wanted[name] = dict(axes)
    asked = {label for axes in (dynamic or {}).values() for label in axes.values()}
    grown = replace(subject, axes=wanted)
    ones = {label for label, size in sizes(grown).items() if size == 1}
    grown = replace(grown, arguments=resized(grown, dict.fromkeys(ones, 2)))
    if not runs(grown):
        grown = replace(subject, axes={name: axes for name, axes in wanted.items() if name in (dynamic or {})})
    closed = [label for label in grown.labels() if label not in asked and other(grown, (label,)) is None]
    return without(grown, closed)


def without(subject: Subject, labels: list[str], why: str = "the model takes no other") -> Subject:
    """Return the subject with some axes closed, and a note."""
    if not labels:
        return subject
    axes = {n: {a: label for a, label in some.items() if label not in labels} for n, some in subject.axes.items()}
    note = f"fixed sizes: {', '.join(f'{label} {sizes(subject)[label]}' for label in labels)}"
    return replace(subject, axes=axes, notes=(*subject.notes, f"{note} ({why})"))


def sizes(subject: Subject) -> dict[str, int]:
    """Return the size of every open axis in the example inputs.

    Raises:
        UsageError: axes of one name have different sizes.
    """
    found: dict[str, int] = {}
    for name, axes in subject.axes.items():
        for axis, label in axes.items():
            size = int(subject.inputs[name].shape[axis])
            if found.setdefault(label, size) != size:
                raise UsageError(f"axis {label!r} is {found[label]} and {size}", hint="Give them different names")
    return found


def resized(subject: Subject, wanted: Mapping[str, int]) -> dict[str, Tensor]:
    """Return all arguments with other sizes of open axes: entries are repeated, in reversed order.

    Masks keep their order, because results for a token with all keys masked differ between implementations.
    """
    changed = dict(subject.arguments)
    for name, axes in subject.axes.items():
        for axis, label in axes.items():
            if label in wanted:
                count = int(changed[name].shape[axis])
                order = [number % count for number in range(wanted[label])]
                if not is_mask(changed[name]):
                    order = [count - 1 - number for number in order]
                changed[name] = changed[name].index_select(axis, torch().tensor(order))
    return changed


def is_mask(tensor: Tensor) -> bool:
    """Return True if a tensor holds flags (integers of at most 1)."""
    return not tensor.is_floating_point() and (not tensor.numel() or int(tensor.max()) <= 1)


def runs(subject: Subject) -> bool:
    """Return True if torch can run the module on its example inputs."""
    try:
        outputs(subject)
    except ModelError:
        return False
    return True


def other(subject: Subject, labels: tuple[str, ...], *, doubled: bool = False) -> Subject | None:
    """Return the subject with larger inputs along these axes, or smaller ones if only those run; else None.

    With `doubled`, twice the size is tried too, which suits networks that halve their feature maps.
    """
    now = sizes(subject)
    larger = {label: now[label] + GROWTH.get(label, STEP) for label in labels}
    tries = [larger, {label: now[label] - 1 for label in labels}]
    if doubled:
        tries.append({label: 2 * now[label] for label in labels})
    for wanted in tries:
        if min(wanted.values(), default=1) > 0:
            changed = replace(subject, arguments=resized(subject, wanted))
            if runs(changed):
                return changed
    return None


def outputs(subject: Subject) -> dict[str, Tensor]:
    """Return torch's outputs.

    Raises:
        ModelError: the module raises, or returns no tensor.
    """
    try:
        with torch().no_grad():
            made = caller(subject)(*subject.inputs.values())
    except Exception as error:
        shapes = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in subject.inputs.items())
        raise ModelError(f"{subject.name} raised {type(error).__name__} on {shapes}: {error}") from error
    if not made:
        raise ModelError(f"{subject.name} gives no tensor", hint="Return a module whose forward gives tensors")
    return made
