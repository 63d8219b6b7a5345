"""`onnxgrail demo`: the whole way on the embedded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import _options as options
from . import _render as render


@click.command()
@click.option("--model", "models", multiple=True, metavar="NAME", help="An embedded model; repeatable.  [default: all]")
@click.option(
    "--ratio",
    "ratios",
    type=options.ratio,
    metavar="R",
    multiple=True,
    default=(0.3, 0.5),
    show_default=True,
    help="Repeatable.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep models and reports in this folder.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Used when timing.")
@options.json_option
@options.verbose_option
@options.progress_option
def demo(
    *,
    models: tuple[str, ...],
    ratios: tuple[float, ...],
    out: Path | None,
    threads: int,
    as_json: bool,
    no_progress: bool,
) -> None:
    """Compress and measure the embedded models.

    Prints quality on held-out data, size and latency, dense and compressed, without and with compensation.
    """
    import onnxgrail

    with render.progress(quiet=False, no_progress=no_progress) as show:
        result = onnxgrail.demo(models=models or None, ratios=ratios, out=out, threads=threads, progress=show)
    if as_json:
        click.echo(result.to_json())
        return
    for name in dict.fromkeys(row.model for row in result.rows):
        _table(name, [row for row in result.rows if row.model == name])
    click.echo(
        f"Latency: median of {result.repeats} interleaved runs, batch {result.batch_size}, {result.threads} thread(s)"
    )


def _table(name: str, rows: list[Any]) -> None:
    dense = rows[0]
    columns = (name, dense.metric, "params", "", "MACs", "", "latency", "")
    cells = [
        (
            f"{row.ratio:g} {row.compensate}" if row.compensate else "dense",
            render.number(row.score, ".4g"),
            render.count(row.params),
            render.change(dense.params, row.params) if row is not dense else "",
            render.count(row.macs),
            render.change(dense.macs, row.macs) if row is not dense else "",
            f"{row.latency_ms:.2f} ms",
            f"{dense.latency_ms / row.latency_ms:.2f} x" if row is not dense else "",
        )
        for row in rows
    ]
    render.table("", columns, cells)
