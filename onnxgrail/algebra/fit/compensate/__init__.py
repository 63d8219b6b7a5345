"""Compensators by name. To add one: a file with a frozen dataclass, and one line in `registry.COMPENSATORS`."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import ClassVar, Protocol

from onnxgrail import registry
from onnxgrail.core import Change, Reducer, View


class Compensator(Protocol):
    """A compensator turns a reducer into new weights; `needs_data` is True if it needs `view.stats`.

    With a method `error(view, reducer)`, it gives the `BlockError` at less cost than with new weights, for searches.
    """

    needs_data: ClassVar[bool]

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """Compute the decision for `view.block`."""
        ...


BEST = "best"  # consumers are fitted to the dense outputs (`sweep`); GRAIL if one cannot be fitted

COMPENSATORS: MutableMapping[str, Compensator] = registry.COMPENSATORS
