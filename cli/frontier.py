"""`onnxgrail frontier`: loss against size, multiply-accumulates and latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .parts import machine, options, render
from .parts.device import resolve_providers
from .parts.help import Grouped
from .parts.progress import progress

COMMON = ("points", "pick", "save_recipes", "data", "most_loss", "minimize", "output", "force", "report", "device")


@click.command(cls=Grouped, common=COMMON)
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@options.options_of(
    "frontier",
    minimize={"help": "Cost that falls by a like share from each point to the next."},
    compensate={
        "help": "Compensation of the remaining weights: as in the GRAIL paper (grail), fitted to the original network "
        "(best), where each point costs as much as a run of compress, or none.",
        "default": "grail",
    },
    report={"help": "Write the result as JSON (.json) or as a page with plots (.html); repeatable."},
)
def frontier(
    *,
    model: Path,
    out: Path | None,
    output: Path | None,
    device: str | None,
    providers: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **settings: Any,
) -> None:
    """Measure what IN loses at about ten sizes, each of which can be written as a file.

    Prints a table, or JSON with --json.  --pick writes the model of one point.
    """
    import onnxgrail

    written = options.one_output(out, output)
    options.keeps(settings["resume"])
    settings = options.chosen(settings)
    settings["providers"] = resolve_providers(device, providers)
    machine.alone()
    machine.ready("frontier")
    with progress(quiet=quiet, no_progress=no_progress) as show:
        found = onnxgrail.frontier(model, written, progress=show, **settings)
    if as_json:
        click.echo(found.to_json())
    render.notes(found.notes, quiet=quiet)
    if as_json or quiet:
        return
    _table(found, settings["save_recipes"])
    if found.written is not None:
        point = found.point(settings["pick"])
        render.say(f"Point {point.number}: loss {_loss(point.loss.mean)}, at most {_loss(point.loss.bound)}")
        render.written(found.written.output)


def _table(found: Any, recipes: Path | None) -> None:
    """Print the original and all points, and how to write one."""
    before, (measure, loss) = found.before, found.measured
    columns = ["point", "loss", "at most", measure, "params", "MACs", "size", "latency"]
    rows = [["original", "", "", "", *_costs(before, before)]]
    for point in found.points:
        agreement = found.agreed(point) + _agreement(point.loss.agreement)
        costs = _costs(point.costs, before)
        rows.append([str(point.number), _loss(point.loss.mean), _loss(point.loss.bound), agreement, *costs])
    for row in (columns, *rows) if not measure else ():  # a loss of the user's own tells no agreement
        del row[3]
    render.table(found.model, columns, rows)
    render.say(f"Loss: {loss} {found.how}; at most: with 95 % confidence")
    if found.choices.get("compensate") == "grail":
        render.say("Fits: --compensate grail; with best, a point of the same size loses less")
    if recipes is not None:
        render.say(f"Recipes: {recipes / 'point1.yaml'} and following")
    if found.written is None:
        render.say(f"Write a point: {found.points[len(found.points) // 2].command}")


def _costs(costs: Any, before: Any) -> tuple[str, str, str, str]:
    """Return the costs as text, latency as a share of the original's."""
    latency = None if costs.latency_ms is None else costs.latency_ms / before.latency_ms
    return render.short(costs.params), render.short(costs.macs), render.size(costs.bytes), render.share(latency)


def _loss(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def _agreement(agreement: Any) -> str:
    """Return a counted agreement as a share, other measures as a number."""
    value = agreement["value"]
    return render.accuracy(value) if agreement["counted"] else render.number(value)
