"""What is decided once: by the first of several processes, and not again where a killed run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from onnxgrail.journal import NO_JOURNAL, Journal
from onnxgrail.parallel import SOLO, Group
from onnxgrail.record import Record


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Once:
    """Where decisions come from: every process gets the same ones, and must ask for them in the same order.

    Attributes:
        group: the processes.
        journal: of the first process; that of the others is empty.
    """

    group: Group = SOLO
    journal: Journal = dataclasses.field(default=NO_JOURNAL)

    def known(self, key: str) -> Record | None:
        """A decision of a run that went before; None where there is none."""
        return self.group.share(self.journal.get(key) if self.group.rank == 0 else None)

    def make(self, key: str, decide: Callable[[], Record]) -> Record:
        """A new decision, taken by the first process, and kept."""
        found = self.shared(decide)
        self.keep(key, found)
        return found

    def shared(self, decide: Callable[[], Record]) -> Record:
        """A decision that is cheap enough not to be kept."""
        found = self.group.share(decide() if self.group.rank == 0 else None)
        assert found is not None, "the first process always decides"
        return found

    def keep(self, key: str, record: Record) -> None:
        """Keep a decision that all processes know already."""
        if self.group.rank == 0:
            self.journal.put(key, record)

    def finished(self, keys: Iterable[str]) -> bool:
        """Whether decisions of a run that went before are known for all of these."""
        return bool(self.shared(lambda: Record(notes={"all": all(self.journal.get(key) for key in keys)})).notes["all"])
