"""Steps of a run: executed once, by the first process or by others, and not again when a killed run is continued."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onnxgrail.machine.group.sums import FIRST, SOLO, Group, Owners
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.machine.steps.journal import NO_JOURNAL, Journal

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """The only access to finished steps of a killed run, and to the other processes.

    All processes get the same results, and must request them in the same order.

    Attributes:
        group: the processes.
        journal: of the first process; that of the others is empty.
    """

    group: Group = SOLO
    journal: Journal = dataclasses.field(default=NO_JOURNAL)

    def once(self, key: str, make: Callable[[], T], codec: Codec[T], owners: Owners = FIRST) -> T:
        """Return the result of a step, which is executed if no earlier run has finished it.

        Args:
            key: name of the step, the same in every run of the same command.
            make: executes the step.
            codec: storage format of its result.
            owners: the processes that execute it.
        """
        found = self.known(key)
        return codec.decode(found if found is not None else self.make(key, lambda: codec.encode(make()), owners))

    def known(self, key: str) -> Record | None:
        """Return the record that an earlier run stored under a key, None if it has not finished that step."""
        return self.group.share(self.journal.get(key) if self.group.rank == 0 else None)

    def make(self, key: str, decide: Callable[[], Record], owners: Owners = FIRST) -> Record:
        """Execute a step, and store its result."""
        found = self.shared(decide, owners)
        self.keep(key, found)
        return found

    def shared(self, decide: Callable[[], Record], owners: Owners = FIRST) -> Record:
        """Execute a step that is too cheap to store, and share its result."""
        return self.dealt([owners], lambda _: decide())[0]

    def dealt(self, owners: Sequence[Owners], decide: Callable[[int], Record]) -> list[Record]:
        """Execute steps that do not depend on each other at the same time, and share their results.

        Args:
            owners: per step, the processes that execute it. If there are several, they share its work, and the result
                of the first of them counts.
            decide: executes the step of a number.
        """
        rank = self.group.rank
        mine = [number for number, one in enumerate(owners) if rank in one.ranks]
        mine.sort(key=lambda number: len(owners[number].ranks) == 1)  # what several do together comes first
        made = {number: decide(number) for number in mine}
        found = []
        for number, one in enumerate(owners):
            record = self.group.share(made.get(number), one.ranks.start)
            assert record is not None, "a process always decides"
            found.append(record)
        return found

    def keep(self, key: str, record: Record) -> None:
        """Store a result that all processes have already."""
        if self.group.rank == 0:
            self.journal.put(key, record)

    def finished(self, keys: Iterable[str]) -> bool:
        """Return True if an earlier run has finished all of these steps."""
        return bool(self.shared(lambda: Record(notes={"all": all(self.journal.get(key) for key in keys)})).notes["all"])

    def alone(self) -> Steps:
        """Return the steps of the first process while the others have nothing to do."""
        return Steps(journal=self.journal)
