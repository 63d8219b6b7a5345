"""Input and output files of a command: checked so that no input is overwritten, and written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.feeds import kinds
from onnxgrail.calibration.feeds.reading import tokenizer_file
from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.mapped import check_unchanged
from onnxgrail.machine.files.paths import Read, check_input, check_output, check_targets, default_output, path_of
from onnxgrail.machine.files.placing import weights_name
from onnxgrail.machine.job import Job
from onnxgrail.machine.scripts import is_named
from onnxgrail.machine.steps import journal
from onnxgrail.recipe import storage
from onnxgrail.report.report import Inspection, Report

Owned = Callable[[Path], bool]
"""Returns True for a file that this run wrote and may replace."""
Place = str | os.PathLike[str]
SUFFIXES = (".json", ".html", ".htm")  # of reports
MEANT = dict.fromkeys((".npz", ".npy", ".jsonl", ".csv", ".parquet", ".arrow"), "--data")
MEANT |= dict.fromkeys(SUFFIXES, "--report") | dict.fromkeys((".yaml", ".yml"), "--save-recipe")
"""Suffixes of files that are no models, with the option that was forgotten before such a name."""
AMOUNT = re.compile(r"0?\.\d+|\d+(\.\d+)?%")


def reads(
    models: Mapping[str, Any], data: Any = None, held_out: Any = None, files: Mapping[str, Any] | None = None
) -> list[Read]:
    """Return all files and folders that a command reads.

    Args:
        models: models of any kind, by their name in messages; model files may refer to weights files.
        data: calibration data of any kind.
        held_out: held-out data, or a number of samples.
        files: paths of further files, one or more, by their name in messages.
    """
    found = [Read(path=path, what=what) for what, paths in (files or {}).items() for path in _several(paths)]
    for what, model in models.items():
        path = path_of(model)
        if path is not None:
            found.append(Read(path=path, what=what))
        named = model_file.beside(model if path is None else path)
        found += [Read(path=file, what=f"a weights file of {what}") for file in named]
    for what, source in (("the calibration data", data), ("the held-out data", held_out)):
        if isinstance(source, str | os.PathLike):
            found.append(kinds.reads(source, what))
    return found


def _several(paths: Any) -> list[Path]:
    if isinstance(paths, str | os.PathLike):
        text = os.fspath(paths)
        return [tokenizer_file(Path(text.rpartition(":")[0] if is_named(text) else text))]  # the only kind in a folder
    found = paths if isinstance(paths, Collection) else []
    return [Path(path) for path in found if isinstance(path, str | os.PathLike)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """The files of a command; None or empty for those it does not write.

    Attributes:
        output: the model.
        stats, recipe: the files of `save_stats` and `save_recipe`.
        reports: files of the report.
        points: recipes of points of a frontier.
        resume: the folder of a run that can be continued.
        force: existing files may be replaced.
        read: files that the command reads, none of which may be written.
    """

    output: Path | None = None
    stats: Path | None = None
    recipe: Path | None = None
    reports: tuple[Path, ...] = ()
    points: tuple[Path, ...] = ()
    resume: Path | None = None
    force: bool = False
    read: tuple[Read, ...] = ()

    def reading(self, read: Iterable[Read]) -> Places:
        """Return the places of a command that also reads these files."""
        return replace(self, read=(*self.read, *read))

    def files(self) -> list[tuple[str, Path]]:
        """Return the options with their files."""
        options = (("--output", self.output), ("--save-stats", self.stats), ("--save-recipe", self.recipe))
        found = [(option, path) for option, path in options if path is not None]
        found += [("--save-recipes", path) for path in self.points]
        return [*found, *(("--report", path) for path in self.reports)]

    def beside(self) -> list[Path]:
        """Return all files but the model."""
        return [path for option, path in self.files() if option != "--output"]

    def check_apart(self) -> None:
        """Check that no output file is read.

        Raises:
            OutputError: an output file is read.
            UsageError: two outputs would be written to one file.
        """
        targets = self.files()
        targets += [("--resume", path) for path in ([] if self.resume is None else journal.files(self.resume))]
        check_targets(targets, self.read, [] if self.resume is None else [("--resume", self.resume)])

    def check_ready(self, owned: Owned = lambda _: False) -> None:
        """Check that the files can be written, before the work is done.

        Args:
            owned: returns True for existing files of this run.

        Raises:
            OutputError: a file exists and may not be replaced, or cannot be written.
            UsageError: the model would have the name of something else.
        """
        models = [read.path.suffix.lower() for read in self.read if read.what == "the input"]
        if self.output is not None and self.output.suffix.lower() not in models:
            _check_name(self.output)
        for option, path in self.files():
            check_output(path, force=self.force or owned(path), what="output" if path == self.output else option)

    def write(self, slim: ir.Model, job: Job, *, apart: bool, sources: Sequence[ir.Model]) -> dict[Path, str]:
        """Write the model, whole or not at all; a run that can be continued keeps its draft in its folder.

        Args:
            slim: the model.
            job: the run.
            apart: weights go into a file next to it.
            sources: models that were read, whose files must not have changed.

        Returns:
            Checksums of the written files by path, the model first; empty if the command writes no model.

        Raises:
            ModelError: a file of the sources has changed.
            OutputError: the model cannot be written.
        """
        target, folder = self.output, job.folder
        if target is None:
            for source in sources:
                check_unchanged(source)
            return {}
        if folder is None:
            return model_file.save(slim, target, apart=apart, sources=sources)
        folder.about_to_write(target)
        written = model_file.save(slim, target, apart=apart, scratch=folder.scratch(target), sources=sources)
        folder.finish()
        return written

    def save_recipe(self, recipe: Recipe, data: Any, held_out: Any, metric: Any) -> list[str]:
        """Write the recipe file if requested; return notes on the parts left out."""
        if self.recipe is None:
            return []
        decides = None if recipe.max_loss is None else metric
        return storage.save(self.recipe, recipe, data=data, held_out=held_out, metric=decides)

    def save_report(self, report: Report | Inspection) -> None:
        """Write a report to all its files, which were checked before the work."""
        for path in self.reports:
            report.save(path, force=True)


def target_of(model: Any, output: Place | None, default: Callable[[Path], Path] = default_output) -> Path | None:
    """Return the output path: `output`, or by default next to a model that is a file; None for other models.

    Args:
        model: the model of the command, of any kind.
        output: the path given by the user.
        default: returns the default path for the model's path.

    Raises:
        ModelError: the model is a file that cannot be read.
    """
    source = path_of(model)
    if source is not None:
        check_input(source, "Give an .onnx file. Exported folders are for compress (in Python: compress_folder)")
    return Path(output) if output is not None else None if source is None else default(source)


def _check_name(target: Path) -> None:
    """Check that a model does not get the name of something else, such as data, which `force` would replace.

    Raises:
        UsageError: it does.
    """
    if target.suffix.lower() == ".ort":
        hint = "Write .onnx, and convert it with python -m onnxruntime.tools.convert_onnx_models_to_ort"
        raise UsageError(f"the output {str(target)!r} would not be a file of ONNX Runtime's own format", hint=hint)
    option = MEANT.get(target.suffix.lower(), "--ratio" if AMOUNT.fullmatch(target.name) else "")
    if option:
        raise UsageError(
            f"the output {str(target)!r} has no name of a model", hint=f"Did you mean {option} {target}? Or add .onnx"
        )


def weights_of(target: Path | None, apart: bool) -> str:
    """Return a name as long as that of the file that takes the weights; empty if they stay in the model file.

    Args:
        target: where the model is written, or would be without `dry_run`; None if it stays in memory.
        apart: the weights lie in a file of their own.
    """
    return weights_name(target or Path("model.onnx"), "0" * 64) if apart else ""


def places_of(
    output: Path | None,
    *,
    save_stats: Place | None = None,
    save_recipe: Place | None = None,
    report: Place | Iterable[Place] = (),
    resume: Place | None = None,
    force: bool = False,
) -> Places:
    """Return the output files of a call with these keywords.

    Raises:
        UsageError: the suffix of a report or of a recipe file is unknown.
    """
    recipe = path_of(save_recipe)
    if recipe is not None:
        storage.check_suffix(recipe)
    reports = [Path(path) for path in ([report] if isinstance(report, str | os.PathLike) else report)]
    for path in reports:
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"report {str(path)!r} has an unknown suffix", hint=f"Choose from {', '.join(SUFFIXES)}")
    return Places(
        output=output,
        stats=path_of(save_stats),
        recipe=recipe,
        reports=tuple(reports),
        resume=path_of(resume),
        force=force,
    )


KEYWORDS = ("save_stats", "save_recipe", "report", "resume")
"""The keywords of `places_of` that name files."""
