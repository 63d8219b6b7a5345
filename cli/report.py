"""`onnxgrail report`: print a report again, compare two, and write either as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .compress import notes, show
from .parts import machine, options, render
from .parts.help import Grouped

MOST = 20  # blocks of a table


@click.command(cls=Grouped)
@click.argument("a", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("b", metavar="[B.json]", required=False, type=click.Path(path_type=Path))
@options.options_of("report", output={"help": "Write a page (.html) instead of tables.", "otherwise": ""})
def report(*, a: Path, b: Path | None, output: Path | None, force: bool) -> None:
    """Show a report again that a run has written as JSON, or two side by side.

    Prints the tables that the run has printed, or a table of what differs between A and B.
    """
    import onnxgrail

    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"{str(output)!r}: the page is written as .html", param_hint="--output")
    machine.ready("Report")
    first = onnxgrail.Report.read(a)
    found: Any = first if b is None else first.beside(onnxgrail.Report.read(b))
    if output is not None:
        found.save(output, force=force)
        render.written(output)
    elif b is None:
        with first.reading():
            render.notes(notes(first.data), quiet=False)
            show(first, first.data["model"]["output"])
    else:
        _both(found, a, b)


def _both(found: Any, a: Path, b: Path) -> None:
    """Print two reports side by side."""
    render.notes(found.notes(), quiet=False)
    render.say(f"A {a}")
    render.say(f"B {b}")
    for one in found.tables():
        rows = one.rows[:MOST]
        render.table(one.title, one.columns, rows, left=one.words)
        if len(rows) < len(one.rows):
            render.say(f"and {len(one.rows) - len(rows)} more: write a page with -o FILE.html")
