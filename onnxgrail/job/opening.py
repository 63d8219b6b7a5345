"""Begin and end a run: lock its folder, check its files, register operator libraries, choose the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import closing, nullcontext

from onnxgrail.calibration.devices.lanes import solving_on
from onnxgrail.calibration.runtime.custom import Libraries
from onnxgrail.calibration.runtime.custom import custom_ops as registered
from onnxgrail.calibration.runtime.provider import noting_left
from onnxgrail.core import Recipe
from onnxgrail.job.places import Places
from onnxgrail.job.resume import replaceable
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import Clock, Progress
from onnxgrail.machine.steps.journal import Folder, Searched
from onnxgrail.machine.steps.steps import Steps


@contextlib.contextmanager
def opened(
    recipe: Recipe, places: Places, *, custom_ops: Libraries, progress: Progress, group: Group = SOLO
) -> Iterator[Job]:
    """Open the job of a command; its folder is locked and its libraries are registered until the block ends.

    Args:
        recipe: the user's choices.
        places: files that the command reads and writes; only the first process does.
        custom_ops: libraries with operators.
        progress: called with stage, done, total.
        group: the processes that share the work.

    Yields:
        The job.

    Raises:
        OutputError: a file exists, is read, or cannot be written; or another run uses the folder.
    """
    first = group.rank == 0
    if first:
        places.check_apart()
    kept = nullcontext() if places.resume is None or not first else closing(Folder(places.resume))
    with kept as folder, registered(custom_ops), solving_on(recipe.providers), noting_left():
        if first:
            places.check_ready(functools.partial(replaceable, folder))
        steps = Steps(group=group, journal=folder or Searched())
        yield Job(recipe=recipe, steps=steps, clock=Clock(progress))
