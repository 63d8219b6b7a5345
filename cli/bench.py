"""`onnxgrail bench`: measure and compare latency of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .parts import machine, options, render, values
from .parts.device import resolve_providers
from .parts.help import Grouped
from .parts.progress import progress


def sizes(value: Any) -> tuple[int, ...]:
    """Parse `1,8,32` into numbers."""
    try:
        found = tuple(int(part) for part in str(value).split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{values.short(value)} is not a list of sizes such as 1,8,32")
    return found


@click.command(cls=Grouped)
@click.argument("models", metavar="A [B ...]", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--batch-size",
    "batch_sizes",
    type=sizes,
    metavar="N[,N...]",
    default="1",
    show_default=True,
    help="Samples per run; several sizes are measured one after another.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    default=3.0,
    show_default=True,
    help="Time for all models together, per batch size.",
)
@click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="Runs of each model, instead of --seconds.")
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Threads inside one operator.  [default: all cores]"
)
@options.options_of(
    "bench", data={"help": "Samples to run on, as for compress."}, seed={"help": "Seed of random inputs."}
)
def bench(
    *,
    models: tuple[Path, ...],
    device: str | None,
    providers: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **settings: Any,
) -> None:
    """Time models in turn, so that load on the machine slows all equally.

    The ratio is the speedup over A, with a 95 % confidence interval.
    """
    import onnxgrail

    settings["providers"] = resolve_providers(device, providers)
    machine.ready("bench")
    with progress(quiet=quiet, no_progress=no_progress) as show:
        result = onnxgrail.bench(*models, progress=show, **settings)
    render.notes([*result.calibration["notes"], *result.notes], quiet=quiet)
    if as_json:
        click.echo(result.to_json())
    elif not quiet:
        _table(result)


def _table(result: Any) -> None:
    columns = ("model", "size", "batch", "median", "p90", "p99", "spread", "samples/s", "ratio", "95 % interval")
    rows = []
    for row in result.rows:
        times = row.times
        ratio = "-" if times.ratio is None else f"{times.ratio:.3f}"
        interval = "-" if times.interval is None else f"{times.interval[0]:.3f}-{times.interval[1]:.3f}"
        if times.hidden:
            ratio, interval = render.quiet("no difference"), render.quiet(interval)
        shown = [f"{value:.3f}" for value in (times.median, times.p90, times.p99, times.spread)]
        cells = (render.size(row.bytes), str(row.batch_size), *shown, render.short(row.throughput), ratio, interval)
        rows.append((row.path, *cells))
    render.table("Milliseconds per run; spread is the distance of the quartiles", columns, rows)
    words = f"{result.threads} thread{'s' if result.threads > 1 else ''}"
    rounds = dict.fromkeys((row.batch_size, row.rounds) for row in result.rows)  # each batch size has its own
    counts = ", ".join(dict.fromkeys(str(count) for _, count in rounds))
    click.echo(f"{counts} rounds, {words}, {result.machine}")
