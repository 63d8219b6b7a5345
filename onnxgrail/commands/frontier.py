"""`frontier`: loss against size, multiply-accumulates and latency, at nested widths that can all be written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.custom import Libraries, files_of
from onnxgrail.calibration.runtime.threads import pinned
from onnxgrail.commands.compress import compress
from onnxgrail.errors import NothingToCompressError, UsageError
from onnxgrail.finishing.empty import no_blocks
from onnxgrail.graph.io.mapped import check_unchanged, unchanged
from onnxgrail.job.opening import opened
from onnxgrail.job.places import places_of, reads, target_of
from onnxgrail.job.points import CLOSED, Points, repeatable
from onnxgrail.job.resume import bind
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.narrowing.frontier import Line, line_of
from onnxgrail.options import Recipe
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.choices import Choices
from onnxgrail.recipe.keywords import checked
from onnxgrail.recipe.table import AMOUNTS, FIELDS
from onnxgrail.report.frontier import Frontier, picked


@checked
@pinned()
def frontier(
    model: Any,
    output: str | Path | None = None,
    *,
    data: Any = None,
    held_out: Any = None,
    points: int = 10,
    most_loss: float = 0.3,
    pick: str | float | None = None,
    save_recipes: str | Path | None = None,
    force: bool = False,
    resume: str | Path | None = None,
    report: str | Path | Iterable[str | Path] = (),
    custom_ops: Libraries = (),
    metric: Any = None,
    progress: Progress = silent,
    **choices: Unpack[Choices],
) -> Frontier:
    """Measure loss against size, multiply-accumulates and latency, at points that can all be written as files.

    Points are nested: no block of a point is wider than in the point before. Statistics of the original model are
    measured once. Each point is decided, fitted and judged on samples that no fit has seen, as with `max_loss`.

    Args:
        model: as for `compress`.
        output: file for the picked point; for a model file it defaults to `IN.compressed.onnx` in the same folder.
        data: calibration data, as for `compress`; required.
        held_out: as for `compress`.
        points: number of points; fewer if the model has fewer steps.
        most_loss: loss (its upper bound) at which the points end, between 0 and 1 or a text such as 30%.
        pick: point to write: its number, or a loss such as 1%, for the smallest point whose loss is at most that.
        save_recipes: folder for recipes of all points, `point1.yaml` and so on, for `apply`.
        force: replace existing files. Input files are never replaced.
        resume: a folder for finished steps; the same call with the same folder continues a killed run.
        report: files for the result: pages if the suffix is .html, JSON if it is .json.
        custom_ops: as for `compress`.
        metric: as for `compress`.
        progress: called with stage, done, total.
        **choices: fields of `Recipe` on data, blocks and fits. `compensate` is `grail` by default; `best` costs as much
            per point as a run of `compress`.

    Returns:
        Frontier: the points, which can be picked and saved.

    Raises:
        UsageError: a choice is unknown or out of range, data are missing, or there is no such point.
        ModelError, DataError, OutputError: the input cannot be used or a file cannot be written.
        NothingToCompressError: no block can lose a unit within the loss.
    """
    recipe = _recipe_of(choices, data, most_loss)
    _check_pick(pick, points, output)
    data, held_out = repeatable(data, held_out, recipe.samples)
    compressed = functools.partial(compress, custom_ops=custom_ops, progress=progress)
    measured = ["--points", str(points), "--most-loss", f"{most_loss:g}"]
    measured += ["--metric", metric] if isinstance(metric, str) else []
    points_of = Points(model=model, data=data, held_out=held_out, recipe=recipe, compress=compressed, measured=measured)
    named = () if save_recipes is None else tuple(Path(save_recipes) / f"point{n}.yaml" for n in range(1, points + 1))
    places = places_of(None if pick is None else target_of(model, output), report=report, resume=resume, force=force)
    used = {"the tokenizer": recipe.tokenizer, "an operator library": files_of(custom_ops), "the metric": metric}
    places = dataclasses.replace(places, points=named).reading(reads({"the input": model}, data, held_out, used))
    with opened(recipe, places, custom_ops=custom_ops, progress=progress) as job:
        source = prepare(model, data, job, held_out, metric)
        with unchanged(source.model):
            bind(job, source, writes=places.beside())
            line = line_of(source, job, points)
            if not line.spots:
                text, hint = _nothing(source, line, recipe)
                raise NothingToCompressError(text, hint=hint)
            check_unchanged(source.model)
    found = points_of.frontier(source, line, named)
    if old := _others(named, len(found.points)):
        found = dataclasses.replace(found, notes=(*found.notes, old))
    for path in places.reports:
        found.save(path, force=True)
    if pick is None:
        return found
    return dataclasses.replace(found, written=found.pick(pick, output, force=force))


def _others(named: Sequence[Path], count: int) -> str:
    """Return a note on recipes of points that an earlier run has left in the folder; empty if there are none."""
    there = sorted(set(named[0].parent.glob("point*.yaml")) - {*named[:count]}) if named else []
    return f"recipes of an earlier run stay: {', '.join(path.name for path in there)}" if there else ""


def _recipe_of(choices: Choices, data: Any, most_loss: float) -> Recipe:
    """Return the recipe of all points, which end at a loss.

    Raises:
        UsageError: a choice is unknown, out of range, or sets an amount; or data are missing.
    """
    given: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    for name in given:
        row = FIELDS.get(name)
        if name in AMOUNTS:
            raise UsageError(f"a frontier has many amounts, and takes no {name}", hint="compress takes one")
        if row is not None and row.commands and "frontier" not in row.commands:
            raise UsageError(f"a frontier takes no {row.spelled}", hint="compress and apply take it")
    if data is None:
        raise UsageError(
            "frontier needs --data: random inputs do not show the loss of real ones",
            hint="Give --data (calib.npz, a folder of images, a text file, file.py:function)",
        )
    return recipe_of({"compensate": CLOSED, "refine": (), **given, "max_loss": most_loss})


def _check_pick(pick: Any, points: int, output: Any) -> None:
    """Check the choice of a point as far as that is possible before the work.

    Raises:
        UsageError: it is no choice, or there cannot be such a point.
    """
    if pick is None:
        if output is not None:
            raise UsageError("an output needs --pick: a frontier has many points", hint="Give --pick 4 or --pick 1%")
        return
    number, _ = picked(pick)
    if number is not None and not 1 <= number <= points:
        raise UsageError(f"there is no point {number}", hint=f"--points {points} gives points 1 to {points}")


def _nothing(source: Prepared, line: Line, recipe: Recipe) -> tuple[str, str]:
    """Return why there is no point, and a hint."""
    if not recipe.only_bits and (not line.chosen or len(line.refusals) == len(line.chosen)):
        return no_blocks(source, line.chosen, line.refusals)
    text = f"no step that saves {recipe.minimize} is predicted to lose at most {100 * (recipe.max_loss or 0):g}%"
    return text, "Give a larger --most-loss"
