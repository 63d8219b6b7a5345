"""Repeat a saved recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Unpack

from onnxgrail.commands.compress import compress
from onnxgrail.core import Recipe
from onnxgrail.job.places import KEYWORDS, places_of, target_of
from onnxgrail.machine.files.paths import Read
from onnxgrail.recipe import storage
from onnxgrail.recipe.check import merged
from onnxgrail.recipe.choices import Options
from onnxgrail.recipe.keywords import checked
from onnxgrail.recipe.trust import FILES
from onnxgrail.report.result import Result


@checked
def apply(
    recipe: Any,
    model: Any,
    output: str | Path | None = None,
    *,
    data: Any = None,
    held_out: Any = None,
    **options: Unpack[Options],
) -> Result:
    """Compress a model with the choices of a saved recipe.

    A recipe holds numbers and choices.  A recipe file may also name data, held-out data, a tokenizer and ids of
    tokens in its own folder; all other files to read, run or write must be arguments of the call (see SECURITY.md).

    Args:
        recipe: a file that `--save-recipe` wrote, a JSON report or its content, a model that onnxgrail wrote, as a file
            or in memory, or choices by name.
        model: as for `compress`.
        output: file to write; for a model file it defaults to `IN.compressed.onnx` in the same folder.
        data: calibration data, instead of the data that the recipe names.
        held_out: held-out data, instead of those that the recipe names.
        **options: all other keywords of `compress`; they override the choices of the recipe.

    Returns:
        Result: the compressed model and its report.

    Raises:
        UsageError: a key of the recipe is unknown, a value is impossible, the recipe names a file that it may not, or
            its run had data, held-out data or a metric and there are none now.
        OnnxGrailError: all errors of `compress`.
    """
    if isinstance(recipe, Recipe):  # made by the calling program, so it is trusted
        choices = merged(dataclasses.asdict(recipe), options)
        return compress(model, output, data=data, held_out=held_out, **choices)
    found = storage.read(recipe)
    data = data if data is not None else found.place("data")
    held_out = held_out if held_out is not None else found.place("held_out")
    found.check_given(data=data, held_out=held_out, metric=options.get("metric"))
    found.check_plugins({name for name, value in options.items() if value is not None})
    if output is None and not options.get("dry_run"):
        found.check_output()
    choices = merged(found.choices, options)
    if isinstance(recipe, str | Path):
        places: dict[str, Any] = {name: value for name, value in options.items() if name in KEYWORDS}
        named = places_of(target_of(model, output), **places)
        named.reading([Read(path=Path(recipe), what="the recipe")]).check_apart()
    for name in FILES:
        if choices.get(name) is None:
            choices[name] = found.place(name)
    return compress(
        model,
        output,
        data=data,
        held_out=held_out,
        **choices,
    )
