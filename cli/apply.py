"""`onnxgrail apply`: repeat a saved recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import _machine
from . import _options as options
from . import _render as render
from . import _values as values
from .compress import finish


@click.command()
@click.argument("recipe", metavar="RECIPE", type=click.Path(path_type=Path))
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write, instead of the recipe's.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--data", "--calib", "data", metavar="PATH", help="Samples to use, instead of the recipe's.")
@click.option(
    "--report",
    "reports",
    type=values.report_file,
    metavar="FILE",
    multiple=True,
    help="Write the report, as .json or as a page, .html; repeatable.",
)
@click.option("--save-as-external-data", is_flag=True, help="Weights in a file beside the model (automatic over 2 GB).")
@click.option("--dry-run", is_flag=True, help="Show what would be done; write no model.")
@options.json_option
@options.quiet_option
@options.verbose_option
@options.progress_option
def apply(
    *,
    recipe: Path,
    model: Path,
    out: Path | None,
    output: Path | None,
    reports: tuple[Path, ...],
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **settings: Any,
) -> None:
    """Compress IN as RECIPE says.

    RECIPE is a file of --save-recipe, a JSON report, or a model that onnxgrail wrote.
    """
    _machine.tune()
    import onnxgrail

    if out is not None and output is not None and out != output:
        raise click.UsageError("give the output once: as OUT or with --output")
    with render.progress(quiet=quiet, no_progress=no_progress) as show:
        result = onnxgrail.apply(recipe, model, out or output, progress=show, **settings)
    finish(result, reports, as_json=as_json, quiet=quiet)
