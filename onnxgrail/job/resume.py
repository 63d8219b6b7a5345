"""Bind the folder of a run that can be continued to its model, data and choices."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from onnxgrail.allocation.statistics import NO_FILES, StatsFiles
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.threads import count
from onnxgrail.calibration.stream.dense import data_key, labels_key, model_key
from onnxgrail.errors import UsageError
from onnxgrail.job.code import code_of, packages
from onnxgrail.machine.extras import version_of
from onnxgrail.machine.files.paths import path_of
from onnxgrail.machine.files.placing import sha256
from onnxgrail.machine.group.sums import Group
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.journal import Folder

# Packages that affect the bits of the result, not only its speed.
PACKAGES = ("onnxgrail", "numpy", "scipy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "torch")


def stats_files(read: str | Path | None, write: str | Path | None) -> StatsFiles:
    """Return the files from which statistics are read and to which they are written.

    Raises:
        UsageError: both are given.
    """
    if read is not None and write is not None:
        raise UsageError("--stats and --save-stats exclude each other", hint="Give one of them")
    return StatsFiles(read=path_of(read), write=path_of(write))


def bind(
    job: Job,
    prepared: Prepared,
    files: StatsFiles = NO_FILES,
    *,
    small: ir.Model | None = None,
    writes: Iterable[Path] = (),
) -> None:
    """Bind the folder of a job to this run, or check that it is bound to the same run.

    Args:
        job: its folder keeps the finished steps; nothing is done for a job without a folder.
        prepared: the model and its data.
        files: of statistics.
        small: the model that is fitted to the other one, if both are given.
        writes: further files that the run is going to write, and may replace when it is continued.

    Raises:
        UsageError: the folder belongs to another run.
    """
    folder, recipe, held = job.folder, job.recipe, prepared.held_out
    if folder is None:
        return
    folder.begin(
        {
            "recipe": dataclasses.asdict(recipe),  # first in messages: it also decides how data are divided
            "model": model_key(prepared.model),
            **({} if small is None else {"small": model_key(small)}),
            "data": data_key(prepared.batches),
            "labels": labels_key(prepared.batches),
            **(
                {}
                if held is None
                else {"held-out data": data_key(held.batches), "their labels": labels_key(held.batches)}
            ),
            **code_of(recipe, None if prepared.metric is None else prepared.metric.function),
            "stats": None if files.read is None or not files.read.is_file() else sha256(files.read),
            "versions": {**versions(), **packages()},
            "threads": count(),
        }
    )
    folder.about_to_write(*writes)


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect results, and the machine type."""
    own = {"python": platform.python_version(), "machine": platform.machine()}
    return {**own, **{name: version_of(name) for name in PACKAGES}}


def replaceable(folder: Folder | None, path: Path) -> bool:
    """Return True if a file was written by this run, before it was killed or had finished."""
    return folder is not None and folder.writes(path)


def agree(group: Group, prepared: Prepared) -> None:
    """Check that all processes of a job have the same model and the same data.

    Raises:
        UsageError: they differ.
    """
    mine = Record(
        notes={
            "blocks": [[b.name, b.units] for b in prepared.survey.blocks],
            "batches": len(prepared.batches),
            "samples": prepared.batches.samples,
        }
    )
    first = group.share(mine)
    assert first is not None
    differ = [what for what, value in mine.notes.items() if first.notes[what] != value]
    if differ:
        raise UsageError(
            f"process {group.rank} sees other {' and '.join(differ)} than process 0",
            hint="Give all processes the same command, model and data",
        )
