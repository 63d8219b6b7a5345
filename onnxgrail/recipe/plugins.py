"""Selectors and compensators of other packages, found by their entry points.

A package declares `[project.entry-points."onnxgrail.selectors"] name = "module:Class"`; it is imported only when an
option gives that name.  The names of built-in selectors and compensators cannot be replaced.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.select.selectors import SELECTORS, needs_gram
from onnxgrail.core import Change, Floats, Reducer, View
from onnxgrail.errors import UsageError

GROUPS: dict[str, tuple[str, MutableMapping[str, Any]]] = {
    "selector": ("onnxgrail.selectors", SELECTORS),
    "compensate": ("onnxgrail.compensators", COMPENSATORS),
}


@dataclass(frozen=True, slots=True)
class Foreign:
    """A plug-in with checks of its results, so that its mistakes raise errors instead of making wrong models."""

    label: str
    inner: Any

    @property
    def needs_data(self) -> bool:
        """Return True if it reads `view.stats`."""
        return bool(self.inner.needs_data)

    @property
    def needs_gram(self) -> bool:
        """Return True if it reads more of the statistics than the diagonals."""
        return needs_gram(self.inner)


@dataclass(frozen=True, slots=True)
class ForeignSelector(Foreign):
    """A selector of another package."""

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Return scores (u,), after checking their shape and values."""
        scores = np.asarray(self.inner(view, rng), np.float64)
        if scores.shape != (view.block.units,) or not np.isfinite(scores).all():
            raise UsageError(
                f"{self.label} gave scores of shape {list(scores.shape)} for block {view.block.name!r}, "
                f"expected {view.block.units} finite numbers"
            )
        return scores


@dataclass(frozen=True, slots=True)
class ForeignCompensator(Foreign):
    """A compensator of another package."""

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """Return the change, after checking its shapes and values."""
        change = self.inner(view, reducer)
        if not isinstance(change, Change):
            raise UsageError(f"{self.label} gave a {type(change).__name__}, expected an onnxgrail.core.Change")
        for number, weight in change.weights:
            rows, members, rest = view.weights[number].shape
            wanted = (len(change.reducer.kept), members, rest)
            if np.shape(weight) != wanted or not np.isfinite(weight).all():
                raise UsageError(
                    f"{self.label} gave weights of shape {list(np.shape(weight))} for {rows} units of block "
                    f"{view.block.name!r}, expected {list(wanted)} finite numbers"
                )
        return change


WRAPPERS = {"selector": ForeignSelector, "compensate": ForeignCompensator}


def foreign(option: str, name: str) -> bool:
    """Return True if a name is not built in and another package has it; nothing is imported."""
    group, known = GROUPS[option]
    return isinstance(known.get(name), Foreign) or (
        name not in known and bool(metadata.entry_points(group=group, name=name))
    )


def look_up(option: str, name: str) -> None:
    """Register the plug-in of that name, if there is one, next to the built-in ones.

    Raises:
        UsageError: it cannot be loaded, is not a plug-in, or two packages have a plug-in of that name.
    """
    group, known = GROUPS[option]
    if name in known:
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
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{label} cannot be loaded: {text}") from error
    if not callable(inner) or not isinstance(getattr(inner, "needs_data", None), bool):
        raise UsageError(f"{label} is no plug-in", hint="It must be callable and have needs_data, True or False")
    known[name] = WRAPPERS[option](label, inner)
