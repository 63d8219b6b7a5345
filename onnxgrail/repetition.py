"""Repeat a saved recipe.  The module is not called `apply`: it would hide the function `onnxgrail.apply`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from onnxgrail import saved
from onnxgrail.choices import Options
from onnxgrail.core import Recipe
from onnxgrail.files import KEYWORDS, target_of, writes_of
from onnxgrail.paths import Read, default_output
from onnxgrail.pipeline import Result, compress


def apply(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    model: Any,
    output: str | Path | None = None,
    *,
    data: Any = None,
    held_out: Any = None,
    **options: Unpack[Options],
) -> Result:
    """Compress a model as a saved recipe says.

    Args:
        recipe: a file that `--save-recipe` wrote, a JSON report, a model that onnxgrail wrote, or choices by name.
        model: as for `compress`.
        output: file to write; without it the one that the recipe names, or `IN.compressed.onnx`.
        data: calibration data instead of what the recipe names.
        held_out: the same for the samples that judge.
        **options: everything else that `compress` takes; choices among them go before those of the recipe.

    Raises:
        UsageError: a key of the recipe is unknown, or a value impossible; the message has the nearest key.
        OnnxGrailError: whatever `compress` raises.
    """
    found = saved.read(recipe)
    choices = {**found.choices, **options}
    output = output if output is not None else found.output
    if isinstance(recipe, str | Path):
        places: dict[str, Any] = {name: value for name, value in options.items() if name in KEYWORDS}
        writes_of(target_of(model, output, default_output), **places).apart(
            [Read(path=Path(recipe), what="the recipe")]
        )
    return compress(
        model,
        output,
        data=data if data is not None else found.data,
        held_out=held_out if held_out is not None else found.held_out,
        **choices,
    )
