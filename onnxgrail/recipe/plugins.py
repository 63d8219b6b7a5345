"""Selectors and compensators of other packages, found by entry points when their name is asked for.

A package declares `[project.entry-points."onnxgrail.selectors"] name = "module:Class"`; nothing of it is imported
before.  Names of onnxgrail's own cannot be taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.select.selectors import SELECTORS, needs_gram
from onnxgrail.core import Change, Floats, Reducer, View
from onnxgrail.errors import UsageError

GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "selector": ("onnxgrail.selectors", SELECTORS),
    "compensate": ("onnxgrail.compensators", COMPENSATORS),
}


@dataclass(frozen=True, slots=True)
class Foreign:
    """A plug-in with what it must keep to: mistakes of others are named, and do not become wrong models."""

    label: str
    inner: Any

    @property
    def needs_data(self) -> bool:
        """Whether it reads `view.stats`."""
        return bool(self.inner.needs_data)

    @property
    def needs_gram(self) -> bool:
        """Whether it reads more of them than the diagonals, which it may deny."""
        return needs_gram(self.inner)


@dataclass(frozen=True, slots=True)
class ForeignSelector(Foreign):
    """A selector of another package."""

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Scores (u,), looked at before they are used."""
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
        """The change, looked at before it is made."""
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
    """Put the plug-in of that name beside the built-in ones, where there is one.

    Raises:
        UsageError: it cannot be loaded, is none, or two packages have one of that name.
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
    except Exception as error:  # whatever a foreign module does when it is imported
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{label} cannot be loaded: {text}") from error
    if not callable(inner) or not isinstance(getattr(inner, "needs_data", None), bool):
        raise UsageError(f"{label} is no plug-in", hint="It must be callable and have needs_data, True or False")
    known[name] = WRAPPERS[option](label, inner)
