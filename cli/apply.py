"""`onnxgrail apply`: repeat a saved recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxgrail.recipe.table.option import NAME

from .compress import finish, measured
from .parts import machine, options
from .parts.device import resolve_providers
from .parts.help import Grouped
from .parts.progress import progress

# Settings that are passed on only if given, else the recipe's apply.
INSTEAD = ("tokenizer", "keep_tokens", "selector", "reducer", "compensate")
NAMED = {"value": NAME, "default": None, "help": "Instead of the recipe's; a plug-in must be named here."}


@click.command(cls=Grouped)
@click.argument("recipe", metavar="RECIPE", type=click.Path(path_type=Path))
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@options.options_of(
    "apply",
    data={"help": "Calibration data, instead of the recipe's.", "otherwise": ""},
    held_out={"otherwise": "as in the recipe"},
    selector=NAMED,
    reducer=NAMED,
    compensate=NAMED,
    device={"otherwise": "the recipe's"},
)
def apply(
    *,
    recipe: Path,
    model: Path,
    out: Path | None,
    output: Path | None,
    report: tuple[Path, ...],
    latency: bool | None,
    device: str | None,
    providers: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **settings: Any,
) -> None:
    """Compress IN with the choices of RECIPE.

    RECIPE is a file of --save-recipe, a JSON report, or a model that onnxgrail wrote.  It holds numbers and choices; a
    recipe file may also name data in its own folder.  It cannot run code, load plug-ins, or name output files.
    """
    import onnxgrail

    written = options.one_output(out, output)
    options.keeps(settings["resume"])
    if device is not None or providers:
        settings["providers"] = resolve_providers(device, providers)
    settings |= measured(latency, report, settings)
    settings = {name: value for name, value in settings.items() if value is not None or name not in INSTEAD}
    machine.ready("apply")
    with progress(quiet=quiet, no_progress=no_progress) as show:
        result = onnxgrail.apply(recipe, model, written, report=report, progress=show, **settings)
    finish(result, as_json=as_json, quiet=quiet)
