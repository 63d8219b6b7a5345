"""Compensators by name. To add a compensator: one file with a frozen dataclass, and one line here."""

from __future__ import annotations

from typing import ClassVar, Protocol

from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.fit.compensate.plain import Plain
from onnxgrail.core import Change, Reducer, View


class Compensator(Protocol):
    """A compensator turns a reducer into new weights; `needs_data` is True if it needs `view.stats`."""

    needs_data: ClassVar[bool]

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """Compute the decision for `view.block`."""
        ...


BEST = "best"  # consumers are fitted to the dense outputs (`sweep`); GRAIL if one cannot be fitted

COMPENSATORS: dict[str, Compensator] = {
    "none": Plain(),
    "grail": Grail(),
    BEST: Grail(),
}
