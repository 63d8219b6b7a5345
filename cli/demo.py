"""`onnxgrail demo`: compress and measure the embedded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .parts import machine, options, render, values
from .parts.help import Grouped
from .parts.progress import progress


@click.command(cls=Grouped)
@click.option("--model", "models", multiple=True, metavar="NAME", help="An embedded model; repeatable.  [default: all]")
@click.option(
    "--ratio",
    "ratios",
    type=values.ratio,
    metavar="R",
    multiple=True,
    default=(0.3, 0.5),
    show_default=True,
    help="Share to remove of the parameters in blocks that can be narrowed; repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep models and reports in this folder.")
@click.option(
    "--threads",
    type=click.IntRange(1, 4096),
    metavar="N",
    default=1,
    show_default=True,
    help="Threads for the latency measurement.",
)
@options.options_of("demo", force={"help": "Replace existing files in that folder."})
def demo(
    *,
    models: tuple[str, ...],
    ratios: tuple[float, ...],
    out: Path | None,
    force: bool,
    threads: int,
    as_json: bool,
    no_progress: bool,
) -> None:
    """Compress and measure the embedded models.

    Prints quality on held-out data, size and latency, dense and compressed, without and with compensation.
    """
    import onnxgrail

    machine.ready("demo")
    with progress(quiet=False, no_progress=no_progress) as show:
        result = onnxgrail.demo(
            models=models or None, ratios=ratios, out=out, force=force, threads=threads, progress=show
        )
    if as_json:
        click.echo(result.to_json())
        return
    for name in dict.fromkeys(row.model for row in result.rows):
        _table(name, [row for row in result.rows if row.model == name])
    threads_text = f"{result.threads} thread{'s' if result.threads > 1 else ''}"
    click.echo(
        f"Latency: median of {result.repeats} interleaved runs, batch {result.batch_size}, {threads_text}, "
        f"{result.machine}"
    )
    if out is not None:
        click.echo(f"Models and reports: {out}")


def _table(name: str, rows: list[Any]) -> None:
    dense = rows[0]
    columns = ("ratio", "repair", dense.metric, "95 %", "params", "MACs", "latency", "", "95 %")
    cells = [
        (
            f"{row.ratio:g}" if row.compensate else "dense",
            row.compensate,
            *_score(row),
            _change(dense.params, row.params) if row.compensate else render.short(row.params),
            _change(dense.macs, row.macs) if row.compensate else render.short(row.macs),
            f"{row.latency_ms:.2f} ms",
            *_speedup(row),
        )
        for row in rows
    ]
    better = "higher" if dense.metric == "accuracy" else "lower"
    render.table(f"{name}: {dense.metric} on held-out data, {better} is better", columns, cells, left=2)


def _score(row: Any) -> tuple[str, str]:
    """Return the score and its 95 % confidence interval."""
    low, high = row.score_interval or (row.score, row.score)
    if row.metric == "accuracy":
        return f"{row.score:.2%}".replace("%", " %"), f"{100 * low:.1f}-{100 * high:.1f}"
    return f"{row.score:.3f}", f"{low:.2f}-{high:.2f}"


def _speedup(row: Any) -> tuple[str, str]:
    """Return the speedup over the dense model and its confidence interval, or that there is no difference."""
    if row.speedup is None or row.speedup_interval is None:
        return "", ""
    low, high = row.speedup_interval
    between = f"{low:.2f}-{high:.2f}"
    if low <= 1 <= high:
        return render.quiet("no difference"), render.quiet(between)
    return f"{row.speedup:.2f} x", between


def _change(before: int | None, after: int | None) -> str:
    """Return the relative change in whole percent, which is short enough for a line of 80 characters."""
    return "-" if not before or after is None else f"{after / before - 1:+.0%}".replace("%", " %")
