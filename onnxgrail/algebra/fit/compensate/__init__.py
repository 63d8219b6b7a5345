"""What consumers become after narrowing.  To add a compensator: one file with a frozen dataclass, one line here."""

from __future__ import annotations

from typing import ClassVar, Protocol

from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.fit.compensate.plain import Plain
from onnxgrail.core import Change, Reducer, View


class Compensator(Protocol):
    """Turns a reducer into new weights; `needs_data` says whether `view.stats` must be there."""

    needs_data: ClassVar[bool]

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """The decision for `view.block`."""
        ...


BEST = "best"  # every consumer is fitted to the dense outputs (`sweep`), GRAIL where one cannot be

COMPENSATORS: dict[str, Compensator] = {
    "none": Plain(),
    "grail": Grail(),
    BEST: Grail(),
}
