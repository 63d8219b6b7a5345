"""`onnxgrail apply`: repeat a saved recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .compress import finish, measured
from .parts import machine, options
from .parts.device import device_instead, resolve_providers
from .parts.help import Grouped
from .parts.progress import progress

INSTEAD = ("tokenizer", "selector", "compensate")  # settings that are passed on only if given, else the recipe's apply


@click.command(cls=Grouped)
@click.argument("recipe", metavar="RECIPE", type=click.Path(path_type=Path))
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write.  [default: IN.compressed.onnx]")
@click.option("--force", is_flag=True, help=options.FORCE)
@click.option("--data", "--calib", "data", metavar="PATH", help="Calibration data, instead of the recipe's.")
@options.held_out_option
@options.tokenizer_option
@click.option("--selector", metavar="NAME", help="Instead of the recipe's; a plug-in must be named here.")
@click.option("--compensate", metavar="NAME", help="Instead of the recipe's; a plug-in must be named here.")
@device_instead
@options.report_option
@options.latency_option
@options.curves_option
@options.external_option("as IN has them")
@options.resume_option
@click.option("--dry-run", is_flag=True, help="Show what would be done; write no model.")
@options.talk_options
def apply(
    *,
    recipe: Path,
    model: Path,
    out: Path | None,
    output: Path | None,
    reports: tuple[Path, ...],
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
    settings |= measured(latency, reports, settings)
    settings = {name: value for name, value in settings.items() if value is not None or name not in INSTEAD}
    machine.ready("apply")
    with progress(quiet=quiet, no_progress=no_progress) as show:
        result = onnxgrail.apply(recipe, model, written, report=reports, progress=show, **settings)
    finish(result, as_json=as_json, quiet=quiet)
