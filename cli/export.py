"""`onnxgrail export`: write a torch module as an equivalent ONNX file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from .parts import machine, options, render, values
from .parts.help import Grouped
from .parts.progress import progress

DTYPES = ("float32", "float16", "bfloat16")
EXPORTERS = ("dynamo", "torchscript")
ATTENTIONS = ("eager", "sdpa")


def _axes(value: Any) -> tuple[str, dict[int, str]]:
    """Parse `name:0=batch,1=sequence` into name and axes; `name:` fixes all axes."""
    name, colon, text = str(value).rpartition(":")  # names may contain a colon
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    known = all(re.fullmatch(r"\d{1,9}", axis) and label.isidentifier() for axis, _, label in pairs)
    if not colon or not name or not known:
        raise click.BadParameter(f"{value!r} is not NAME:0=batch,1=sequence")
    return name, {int(axis): label for axis, _, label in pairs}


@click.command(cls=Grouped)
@click.argument("spec", metavar="SPEC")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--static", is_flag=True, help="Fix all sizes to those of the example inputs.")
@click.option(
    "--dynamic",
    type=_axes,
    metavar="NAME:AXIS=LABEL,...",
    multiple=True,
    help="Open axes of an input, instead of the guess (batch and sequence): x:0=batch,2=height,3=width; repeatable.",
)
@click.option(
    "--opset",
    type=click.IntRange(min=9),
    metavar="N",
    default=20,
    show_default=True,
    help="Version of the ONNX operators.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Type of weights and activations.  [default: that of the module; bfloat16 becomes float32]",
)
@click.option(
    "--exporter", type=click.Choice(EXPORTERS), help="Use only this exporter of torch.  [default: both, in turn]"
)
@click.option(
    "--attention",
    type=click.Choice(ATTENTIONS),
    help="Attention implementation of transformers models.  [default: both, in turn]",
)
@click.option(
    "--task",
    metavar="TASK",
    help="Task of a transformers model, such as feature-extraction.  [default: the task it was saved for]",
)
@click.option(
    "--random-weights", is_flag=True, help="Use random weights; only the description of the architecture is fetched."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="E",
    help="Exit 3 if the relative error of an output is higher.  [default: 0.001; 0.03 in half precision]",
)
@options.options_of(
    "export",
    force={"help": "Replace an existing output."},
    save_as_external_data={"otherwise": "inside"},
    check={"help": "Compare with torch at several shapes."},
)
def export(
    *,
    spec: str,
    target: Path,
    dynamic: tuple[tuple[str, dict[int, str]], ...],
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **settings: Any,
) -> None:
    """Write a torch model as ONNX (needs torch).

    SPEC is file.py:function (which is run, and returns a module or a module with example inputs), torchvision:NAME,
    timm:NAME-or-folder or transformers:NAME-or-folder.
    """
    import onnxgrail

    if settings["tolerance"] is not None and not settings["check"]:
        raise click.UsageError("--tolerance needs the check that --no-check turns off")
    settings["dynamic"] = dict(dynamic) or None
    machine.ready("export")
    with progress(quiet=quiet, no_progress=no_progress) as show:
        result = onnxgrail.export(spec, target, progress=show, **settings)
    render.notes(result.notes, quiet=quiet)
    if as_json:
        click.echo(result.to_json())
    elif not quiet:
        _tables(result)
    if not result.gates_passed:
        failed = next(check for check in result.checks if not check.passed)
        click.echo(f"Error: gate failed: {failed.told()}; {result.output} was written", err=True)
        click.get_current_context().exit(values.EXIT_GATE)


def _tables(result: Any) -> None:
    attention = f", {result.attention} attention" if result.attention else ""
    click.echo(f"{result.source}: {result.exporter} exporter, opset {result.opset}{attention}")
    rows = [(name, _shape(shape)) for name, shape in result.inputs.items()]
    render.table("", ("input", "shape"), rows, left=2)
    if result.checks:
        cells = [
            (c.what, ", ".join(f"{n}{_shape(s)}" for n, s in c.shapes.items()), c.output, render.number(c.error, ".1e"))
            for c in result.checks
        ]
        render.table("Against torch", ("run on", "inputs", "worst output", "relative error"), cells, left=3)
    click.echo(f"{render.count(result.params)} parameters, {render.size(result.bytes)}")
    click.echo(f"Written: {result.output}")


def _shape(shape: Any) -> str:
    return f"[{', '.join(map(str, shape))}]"
