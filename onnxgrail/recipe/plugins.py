"""Selectors, reducers and compensators of other packages and programs, whose results are checked.

A package declares `[project.entry-points."onnxgrail.selectors"] name = "module:Class"`; it is imported only when an
option gives that name.  The names of built-in ones cannot be replaced.  A program puts objects into the registries.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS, needs_gram
from onnxgrail.core import BlockError, Change, Floats, Reducer, View
from onnxgrail.errors import OnnxGrailError, UsageError, in_words, raised
from onnxgrail.registry import is_ours

LARGEST = float(np.finfo(np.float32).max)  # a weight that a file can hold
GROUPS: dict[str, tuple[str, MutableMapping[str, Any]]] = {
    "selector": ("onnxgrail.selectors", SELECTORS),
    "reducer": ("onnxgrail.reducers", REDUCERS),
    "compensate": ("onnxgrail.compensators", COMPENSATORS),
}


@dataclass(frozen=True, slots=True)
class Foreign:
    """A plug-in with checks of its results, so that its mistakes raise errors instead of making wrong models.

    Attributes:
        label: its name in messages.
        inner: the object.
        packaged: True if it is of a package, which was imported because an option names it.
    """

    label: str
    inner: Any
    packaged: bool

    @property
    def needs_data(self) -> bool:
        """Return True if it reads `view.stats`."""
        return bool(self.inner.needs_data)

    @property
    def needs_gram(self) -> bool:
        """Return True if it reads more of the statistics than the diagonals."""
        return needs_gram(self.inner)

    @property
    def consumers_only(self) -> bool:
        """Return True if it reads weights of consumers only."""
        return bool(getattr(self.inner, "consumers_only", False))

    def made(self, *arguments: Any) -> Any:
        """Return what the object makes of its arguments.

        Raises:
            UsageError: it raises an error, which may be any.
        """
        try:
            return self.inner(*arguments)
        except (OnnxGrailError, MemoryError):
            raise
        except Exception as error:
            raise UsageError(f"{self.label} {raised(error)}") from error

    def numbers(self, array: Any) -> Floats:
        """Return an array of real numbers in float64; one NaN for anything else."""
        try:
            found = np.asarray(array)
            return np.asarray(found, np.float64) if found.dtype.kind in "fiub" else np.asarray(np.nan)
        except (TypeError, ValueError):  # lists of different lengths
            return np.asarray(np.nan)

    def check(self, found: Any, kept: int, units: int) -> Reducer:
        """Return a reducer, after checking the units that stay and the clusters."""
        if not isinstance(found, Reducer):
            raise UsageError(f"{self.label} gave a {type(found).__name__}, expected an onnxgrail.core.Reducer")
        stay, clusters = np.asarray(found.kept), found.cluster
        right = stay.shape == (kept,) and stay.dtype.kind in "iu" and bool((np.diff(stay) > 0).all())
        if not right or stay[0] < 0 or stay[-1] >= units:
            raise UsageError(f"{self.label} does not keep {kept} different units of {units}, in ascending order")
        if clusters is not None and (np.shape(clusters) != (units,) or set(np.unique(clusters)) != set(range(kept))):
            raise UsageError(f"{self.label} gave clusters that are not 0 to {kept - 1} for {units} units")
        return found


@dataclass(frozen=True, slots=True)
class ForeignSelector(Foreign):
    """A selector of another package or program."""

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Return scores (u,), after checking their shape and values."""
        scores = self.numbers(self.made(_read_only(view), rng))
        if scores.shape != (view.block.units,) or not np.isfinite(scores).all():
            raise UsageError(
                f"{self.label} gave scores of shape {list(scores.shape)} for block {view.block.name!r}, "
                f"expected {view.block.units} finite numbers"
            )
        return scores


@dataclass(frozen=True, slots=True)
class ForeignReducer(Foreign):
    """A reducer of another package or program."""

    @property
    def needs_scores(self) -> bool:
        """Return True if it reads scores of a selector."""
        return bool(getattr(self.inner, "needs_scores", True))

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """Return the reducer, after checking the units that stay and the clusters."""
        return self.check(self.made(_read_only(view), kept, scores, rng), kept, view.block.units)


@dataclass(frozen=True, slots=True)
class ForeignCompensator(Foreign):
    """A compensator of another package or program."""

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """Return the change, after checking its shapes and values."""
        change = self.made(_read_only(view), reducer)
        if not isinstance(change, Change):
            raise UsageError(f"{self.label} gave a {type(change).__name__}, expected an onnxgrail.core.Change")
        kept, units = len(self.check(change.reducer, len(reducer.kept), view.block.units).kept), view.block.units
        for number, weight in change.weights:
            if number not in range(len(view.weights)):
                most = len(view.weights) - 1
                raise UsageError(f"{self.label} gave weights of slot {number}, expected 0 to {most}")
            wanted, values = (kept, *view.weights[number].shape[1:]), self.numbers(weight)
            if values.shape != wanted or not np.abs(values).max(initial=0.0) <= LARGEST:
                raise UsageError(
                    f"{self.label} gave weights of shape {list(values.shape)} for {units} units of block "
                    f"{view.block.name!r}, expected {list(wanted)} finite numbers of float32"
                )
        return change

    @property
    def error(self) -> Callable[[View, Reducer], BlockError] | None:
        """Return its method that computes the error of a block without new weights; None if it has none."""
        if not hasattr(self.inner, "error"):
            return None

        def error(view: View, reducer: Reducer) -> BlockError:
            found = Foreign(f"error of {self.label}", self.inner.error, self.packaged).made(_read_only(view), reducer)
            if not isinstance(found, BlockError):
                raise UsageError(f"error of {self.label} gave a {type(found).__name__}, expected a BlockError")
            return found

        return error


@dataclass(frozen=True, slots=True, eq=False)
class _ReadOnly(Sequence[Floats]):
    """Arrays that plug-ins may read: they are those that the run goes on with."""

    arrays: Sequence[Floats]

    def __len__(self) -> int:
        """Return their number."""
        return len(self.arrays)

    def __getitem__(self, number: Any) -> Any:
        """Return one of them."""
        return _locked(self.arrays[number])


def _locked(array: Any) -> Any:
    if not isinstance(array, np.ndarray):  # on a device
        return array
    found = array.view()
    found.flags.writeable = False
    return found


def _read_only(view: View) -> View:
    """Return a view whose arrays cannot be changed."""
    stats = tuple(replace(one, gram=_locked(one.gram), total=_locked(one.total)) for one in view.stats)
    return replace(view, weights=_ReadOnly(view.weights), stats=stats)


WRAPPERS = {"selector": ForeignSelector, "reducer": ForeignReducer, "compensate": ForeignCompensator}


def foreign(option: str, name: str) -> bool:
    """Return True if a name is not built in and another package has it; nothing is imported."""
    group, known = GROUPS[option]
    if name in known:
        return isinstance(known[name], Foreign) and known[name].packaged
    return bool(metadata.entry_points(group=group, name=name))


def look_up(option: str, name: str) -> None:
    """Register the plug-in of that name, if there is one, next to the built-in ones; check what a program registered.

    Raises:
        UsageError: it cannot be loaded, is not a plug-in, or two packages have a plug-in of that name.
    """
    group, known = GROUPS[option]
    if name in known:
        inner = known[name]
        if not isinstance(inner, Foreign) and not is_ours(inner):
            known[name] = _guarded(option, f"{option} {name!r}", inner, packaged=False)
        return
    found = list(metadata.entry_points(group=group, name=name))
    if not found:
        return
    owners = sorted({entry.dist.name if entry.dist is not None else entry.value for entry in found})
    if len(owners) > 1:
        raise UsageError(f"{option} {name!r} is in {' and '.join(owners)}", hint="Uninstall all but one of them")
    label = f"{option} {name!r} of {owners[0]}"
    try:
        inner = found[0].load()
        inner = inner() if isinstance(inner, type) else inner
    except Exception as error:  # a foreign module may raise anything when it is imported
        raise UsageError(f"{label} cannot be loaded: {in_words(error)}") from error
    known[name] = _guarded(option, label, inner, packaged=True)


def _guarded(option: str, label: str, inner: Any, *, packaged: bool) -> Foreign:
    """Return an object with checks of its results.

    Raises:
        UsageError: it is not a plug-in.
    """
    if isinstance(inner, type):
        raise UsageError(f"{label} is a class", hint=f"Register an object: {inner.__name__}()")
    if not callable(inner) or not isinstance(getattr(inner, "needs_data", None), bool):
        raise UsageError(f"{label} is not a plug-in", hint="It must be callable and have needs_data, True or False")
    return WRAPPERS[option](label, inner, packaged)
