"""Steps of a run: taken once, by the first of several processes, and not again where a killed run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.journal import NO_JOURNAL, Journal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """How the result of a step is stored: `encode` makes a record of it, `decode` reads it back."""

    encode: Callable[[T], Record]
    decode: Callable[[Record], T]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """The only door to what a killed run has finished, and to the other processes.

    Every process gets the same results, and must ask for them in the same order.

    Attributes:
        group: the processes.
        journal: of the first process; that of the others is empty.
    """

    group: Group = SOLO
    journal: Journal = dataclasses.field(default=NO_JOURNAL)

    def once(self, key: str, make: Callable[[], T], codec: Codec[T]) -> T:
        """Return the result of a step, which the first process takes if no run before has finished it.

        Args:
            key: name of the step, the same in every run of the same command.
            make: takes the step.
            codec: how its result is stored.
        """
        found = self.known(key)
        return codec.decode(found if found is not None else self.make(key, lambda: codec.encode(make())))

    def known(self, key: str) -> Record | None:
        """Return what a run before has stored under a key, None if it has not finished that step."""
        return self.group.share(self.journal.get(key) if self.group.rank == 0 else None)

    def make(self, key: str, decide: Callable[[], Record]) -> Record:
        """Take a step in the first process, and store its result."""
        found = self.shared(decide)
        self.keep(key, found)
        return found

    def shared(self, decide: Callable[[], Record]) -> Record:
        """Take a step in the first process that is cheap enough not to be stored."""
        found = self.group.share(decide() if self.group.rank == 0 else None)
        assert found is not None, "the first process always decides"
        return found

    def keep(self, key: str, record: Record) -> None:
        """Store a result that all processes know already."""
        if self.group.rank == 0:
            self.journal.put(key, record)

    def finished(self, keys: Iterable[str]) -> bool:
        """Return True if a run before has finished all of these steps."""
        return bool(self.shared(lambda: Record(notes={"all": all(self.journal.get(key) for key in keys)})).notes["all"])

    def alone(self) -> Steps:
        """Return the steps of the first process while the others have nothing to do."""
        return Steps(journal=self.journal)
