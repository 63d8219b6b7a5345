"""The state that all stages of a run share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from onnxgrail.core import Recipe
from onnxgrail.machine.group.sums import Group
from onnxgrail.machine.progress import Clock, Progress
from onnxgrail.machine.steps.journal import Folder
from onnxgrail.machine.steps.steps import Steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """The choices of a run, the steps it has finished, its clock, and where its weights go.

    Attributes:
        recipe: the user's choices.
        steps: results of earlier runs, and the other processes.
        clock: seconds per stage; reports the progress.
        weights: a name as long as that of the file that takes the weights; empty if they stay in the model file.
        held_out: held-out data or their number as the user gave them, for the model's own recipe.
    """

    recipe: Recipe
    steps: Steps = field(default_factory=Steps)
    clock: Clock = field(default_factory=Clock)
    weights: str = ""
    held_out: Any = None

    @property
    def group(self) -> Group:
        """Return the processes that share the work."""
        return self.steps.group

    def alone(self) -> Job:
        """Return the job of the first process while the others have nothing to do."""
        return replace(self, steps=self.steps.alone())

    @property
    def first(self) -> bool:
        """Return True in the process that decides, writes and reports."""
        return self.group.rank == 0

    @property
    def folder(self) -> Folder | None:
        """Return the folder of a run that can be continued; None for other runs, and for other processes."""
        journal = self.steps.journal
        return journal if isinstance(journal, Folder) else None

    @property
    def progress(self) -> Progress:
        """Return the progress callback, called with stage, done, total."""
        return self.clock.progress
