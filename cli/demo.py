"""`onnxgrail demo`: the whole way on the embedded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import _machine
from . import _options as options
from . import _render as render
from . import _values as values
from ._progress import progress


@click.command()
@click.option("--model", "models", multiple=True, metavar="NAME", help="An embedded model; repeatable.  [default: all]")
@click.option(
    "--ratio",
    "ratios",
    type=values.ratio,
    metavar="R",
    multiple=True,
    default=(0.3, 0.5),
    show_default=True,
    help="Share of units to remove per block; repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep models and reports in this folder.")
@click.option("--force", is_flag=True, help="Replace files of the same names in that folder.")
@click.option(
    "--threads", type=click.IntRange(1, 4096), metavar="N", default=1, show_default=True, help="Used when timing."
)
@options.json_option
@options.verbose_option
@options.progress_option
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

    _machine.ready("demo")
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
    columns = ("ratio", "compensate", dense.metric, "params", "", "MACs", "", "latency", "")
    cells = [
        (
            f"{row.ratio:g}" if row.compensate else "dense",
            row.compensate,
            f"{row.score:.2%}".replace("%", " %") if row.metric == "accuracy" else f"{row.score:.3f}",
            render.short(row.params),
            _change(dense.params, row.params) if row.compensate else "",
            render.short(row.macs),
            _change(dense.macs, row.macs) if row.compensate else "",
            f"{row.latency_ms:.2f} ms",
            f"{dense.latency_ms / row.latency_ms:.2f} x" if row.compensate else "",
        )
        for row in rows
    ]
    better = "higher" if dense.metric == "accuracy" else "lower"
    render.table(f"{name}: {dense.metric} on held-out data, {better} is better", columns, cells, left=2)


def _change(before: int | None, after: int | None) -> str:
    """Relative change in whole percent, which leaves room for the rest on a line of 80."""
    return "-" if not before or after is None else f"{after / before - 1:+.0%}".replace("%", " %")
