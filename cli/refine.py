"""`onnxgrail refine`: fit a small model, pruned by any tool, to the model it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .parts import close, machine, options, render, values
from .parts.device import resolve_providers
from .parts.help import Grouped
from .parts.progress import progress

COMMON = (
    "data",
    "tokenizer",
    "reference",
    "refine",
    "budget_seconds",
    "output",
    "force",
    "report",
    "min_cosine",
    "device",
)


@click.command(cls=Grouped, common=COMMON)
@click.argument("model", metavar="SMALL", type=click.Path(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@options.options_of(
    "refine",
    output={"otherwise": "SMALL.refined.onnx"},
    dry_run={"help": "Fit and report; write no model."},
    save_as_external_data={"otherwise": "as SMALL has them"},
    refine={"default": ("laco", "distill")},
    check={"help": "Compare with DENSE before and after the fit."},
    report={"help": "Write the report as JSON (.json) or as a page (.html); repeatable."},
)
def refine(
    *,
    model: Path,
    out: Path | None,
    output: Path | None,
    device: str | None,
    providers: tuple[str, ...],
    report: tuple[Path, ...],
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **settings: Any,
) -> None:
    """Fit SMALL, pruned by any tool, to DENSE: by gradient, without labels (needs torch).

    Blocks are matched by name, or in order if both models have the same number of blocks of the same shapes.
    """
    import onnxgrail

    written = options.one_output(out, output)
    settings["providers"] = resolve_providers(device, providers)
    options.keeps(settings["resume"])
    machine.alone()
    machine.ready("refine_model")
    with progress(quiet=quiet, no_progress=no_progress) as show:
        result = onnxgrail.refine_model(model, written, report=report, progress=show, **settings)
    data = result.report.data
    render.notes([*data["calibration"]["notes"], *data["notes"]], quiet=quiet)
    if as_json:
        click.echo(result.report.to_json())
    elif not quiet:
        _tables(result)
    if not result.gates_passed:
        render.say(f"Error: gate failed: an output's cosine is below --min-cosine {settings['min_cosine']}", err=True)
        click.get_current_context().exit(values.EXIT_GATE)


def _tables(result: Any) -> None:
    data = result.report.data
    render.sizes(f"{data['model']['input']}\nfitted to {data['reference']['path']}", result.report.summary_rows())
    for line in render.refines(data["refines"]):
        render.say(line)
    close.headline(result.report.headline())
    for line in result.report.output_lines():
        render.say(line)
    render.written(result.output)
