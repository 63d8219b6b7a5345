"""The points of a frontier: their recipes, their commands, and the files that they are written to."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnxgrail.calibration.feeds.kinds.feeds import again
from onnxgrail.calibration.prepared import Prepared, judged_by
from onnxgrail.errors import UsageError
from onnxgrail.graph.bits.plan import FLOAT
from onnxgrail.machine.files.paths import make_folder, path_of
from onnxgrail.machine.files.placing import sha256
from onnxgrail.narrowing.frontier import Line
from onnxgrail.options import Recipe
from onnxgrail.recipe import storage
from onnxgrail.recipe.table import AMOUNTS
from onnxgrail.report.environment import calibration_entry
from onnxgrail.report.frontier import Frontier, Point
from onnxgrail.report.page.command import options_of
from onnxgrail.report.result import Result
from onnxgrail.search.points import Spot

CLOSED = "grail"  # compensator by default: best would take as long per point as a run of `compress`


def repeatable(data: Any, held_out: Any, samples: int | None) -> tuple[Any, Any]:
    """Return data that every point can read: those of iterators in lists.

    Args:
        data: calibration data.
        held_out: data that judge.
        samples: number of feeds to read, None for the usual limit.
    """
    return again(data, samples), again(held_out, None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Points:
    """The model, the data and the choices that all points of a frontier share.

    Attributes:
        model, data, held_out: as given.
        recipe: of all points, without their widths.
        compress: writes a model with the choices of a recipe.
        measured: options that are not in the recipe, and decide which points there are.
    """

    model: Any
    data: Any
    held_out: Any
    recipe: Recipe
    compress: Callable[..., Result]
    measured: Sequence[str] = ()

    def with_widths(self, point: Spot | Point) -> Recipe:
        """Return the recipe of a point."""
        amounts = {"max_loss": None, "minimize": Recipe().minimize, "only_bits": False, "only_widths": False}
        bits = {name: number for name, number in point.bits.items() if number < FLOAT}
        return replace(self.recipe, **amounts, widths=dict(point.widths), bits=bits or None)  # type: ignore[arg-type]

    def save(self, file: Path, point: Spot) -> list[str]:
        """Write the recipe of a point; return notes on what it leaves out."""
        make_folder(file.parent)
        notes = storage.save(file, self.with_widths(point), data=self.data, held_out=self.held_out)
        return [note.replace(file.name, "each recipe", 1) for note in notes]

    def files(self) -> dict[Path, str]:
        """Return the checksums of the files of model and data, as far as they are at a path."""
        paths = (path_of(source) for source in (self.model, self.data, self.held_out))
        return {path: sha256(path) for path in paths if path is not None and path.is_file()}

    def write(self, files: Mapping[Path, str], point: Point, output: str | Path | None, force: bool) -> Result:
        """Write the model of a point.

        Args:
            files: checksums when the point was measured.
            point: which.
            output: as for `compress`.
            force: a file there may be replaced.

        Raises:
            UsageError: a file has changed.
            OnnxGrailError: all errors of `compress`.
        """
        now = self.files()
        changed = [path for path, before in files.items() if now.get(path) != before]
        if changed:
            text = f"{str(changed[0])!r} has changed since the frontier was measured"
            raise UsageError(text, hint="Measure it again")
        choices: dict[str, Any] = asdict(self.with_widths(point))
        return self.compress(self.model, output, data=self.data, held_out=self.held_out, force=force, **choices)

    def frontier(self, source: Prepared, line: Line, recipes: Sequence[Path]) -> Frontier:
        """Write the recipes of all points to their files, if there are any, and return the frontier."""
        saved = [note for file, spot in zip(recipes, line.spots, strict=False) for note in self.save(file, spot)]
        points = tuple(
            Point(
                number=number,
                widths=spot.widths,
                bits=spot.bits,
                predicted=spot.predicted,
                loss=spot.loss,
                costs=costs,
                command=self.command(number, recipes),
            )
            for number, (spot, costs) in enumerate(zip(line.spots, line.costs, strict=True), 1)
        )
        return Frontier(
            model=str(path_of(self.model) or "model"),
            before=line.before,
            points=points,
            minimize=self.recipe.minimize,
            crossed=line.crossed,
            choices=asdict(self.recipe),
            calibration=calibration_entry(source.batches),
            judged=judged_by(source),
            notes=tuple(dict.fromkeys(filter(None, (*source.batches.notes, source.scarce(), line.note, *saved)))),
            write=functools.partial(self.write, self.files()),
        )

    def command(self, number: int, recipes: Sequence[Path]) -> str:
        """Return the command that writes a point: from its recipe if there is one, else from the same measurements."""
        model = path_of(self.model) or Path("MODEL.onnx")
        files = [str(model), str(model.with_name(f"{model.stem}.point{number}.onnx"))]
        words = ["onnxgrail", "apply", str(recipes[number - 1])] if recipes else ["onnxgrail", "frontier"]
        words += [*files, "--data", _text(self.data, "DATA")]
        words += [] if self.held_out is None else ["--held-out", _text(self.held_out, "OTHER_DATA")]
        if recipes:
            return shlex.join(words)
        choices = {name: value for name, value in asdict(self.recipe).items() if name not in AMOUNTS}
        fit = choices.pop("compensate")
        words += [word for group in options_of(choices) for word in group]
        words += [] if fit == CLOSED else ["--compensate", fit]
        return shlex.join([*words, *self.measured, "--pick", str(number)])


def _text(source: Any, otherwise: str) -> str:
    """Return a path or a number as a word of a command."""
    return str(source) if isinstance(source, str | int | os.PathLike) else otherwise
