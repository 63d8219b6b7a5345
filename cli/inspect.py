"""`onnxgrail inspect`: what can be narrowed, what cannot, and what it would save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import _options as options
from . import _render as render


@click.command()
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@options.shapes_option
@options.json_option
@options.verbose_option
def inspect(model: Path, input_shapes: tuple[tuple[str, tuple[int, ...]], ...], as_json: bool) -> None:
    """Show what can be narrowed, what not, and why; needs no data."""
    import onnxgrail

    found = onnxgrail.inspect(model, input_shapes=dict(input_shapes))
    if as_json:
        click.echo(found.to_json())
        return
    _sizes(found)
    _blocks(found)
    if found.refusals:
        columns = ("node", "op", "value", "reason")
        rows = [(r.node, r.op, r.value, r.reason) for r in found.refusals]
        render.table("Left alone", columns, rows, left=len(columns))


def _blocks(found: Any) -> None:
    columns = ("block", "producers", "consumers", "kind", "units", "unit size", "params", "MACs")
    rows = [
        (
            block["name"],
            "\n".join(block["producers"]),
            "\n".join(block["consumers"]),
            block["kind"],
            str(block["units"]),
            str(block["unit_size"]),
            render.count(block["params"]),
            render.count(block["macs"]),
        )
        for block in found.blocks
    ]
    render.table(f"{len(rows)} blocks", columns, rows, left=4)


def _sizes(found: Any) -> None:
    rows = [("now", render.count(found.params), render.count(found.macs), render.size(found.bytes))]
    for kind, held in found.shares.items():
        rows.append((f"in {kind} blocks", render.share(held["params"]), render.share(held["macs"]), ""))
    for guess in found.predicted:
        label = f"at ratio {guess['ratio']:g}"
        rows.append((label, render.count(guess["params"]), render.count(guess["macs"]), render.size(guess["bytes"])))
    render.table(str(found.path), ("", "params", "MACs", "size"), rows)
