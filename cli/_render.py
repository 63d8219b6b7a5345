"""Numbers to text: tables on stdout, progress and notes on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

WIDTH = 140  # of tables that go to a file or a pipe
Show = Callable[[str, int, int], None]


def count(value: float | None) -> str:
    """A number of things: 1,234 or 21.3 M."""
    if value is None:
        return "-"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {letter}"
    return f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes: 812 B, 3.4 MB."""
    if value is None:
        return "-"
    for limit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {letter}"
    return f"{value:.0f} B"


def change(before: float | None, after: float | None) -> str:
    """Relative change: -29.1 %."""
    if before is None or after is None or before == 0:
        return "-"
    return f"{(after - before) / before:+.1%}".replace("%", " %")


def share(value: float | None) -> str:
    """A share: 41.0 %."""
    return "-" if value is None else f"{value:.1%}".replace("%", " %")


def number(value: float | None, spec: str = ".4f") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, spec)


def several(number: int, what: str) -> str:
    """A number of things in words: 1 sample, 8 samples."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def short(value: float | None) -> str:
    """A number of things in three digits: 812, 49.2 k, 1.18 M."""
    if value is None:
        return "-"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:#.3g} {letter}".replace(". ", " ")
    return f"{value:.0f}"


def scores(*checks: Any) -> str:
    """How the original and the results do where classes are known: `, top-1 99.50 % -> 98.75 %`."""
    for key, label, show in (("top1", "top-1", accuracy), ("perplexity", "perplexity", number)):
        if all(check.get(key) is not None for check in checks):
            values = (checks[0][f"{key}_reference"], *(check[key] for check in checks))
            return f", {label} {' -> '.join(map(show, values))}"
    return ""


def accuracy(value: float | None) -> str:
    """A share of samples: 98.75 %."""
    return "-" if value is None else f"{value:.2%}".replace("%", " %")


def sizes(title: str, rows: Iterable[Any]) -> None:
    """Print what a model weighed before and weighs after: the report's summary rows."""
    printers = {"count": count, "bytes": size}
    cells = []
    for row in rows:
        show = printers[row.unit]
        cells.append((row.label, show(row.before), show(row.after), change(row.before, row.after)))
    table(title, ("", "before", "after", "change"), cells)


def written(output: Any) -> None:
    """Where the model is."""
    say(f"Written: {output}" if output is not None else "Dry run: no model was written")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table on stdout; the first `left` columns are aligned left and may wrap, the others hold numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for position, name in enumerate(columns):
        text = position < left
        grid.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))  # names may hold brackets, which are no markup
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    if title:
        console.print(Text(title, overflow="fold"))
    console.print(grid)


def say(line: str, *, err: bool = False) -> None:
    """Print a line in which names out of a file may stand."""
    click.echo(printable(line), err=err)


def printable(text: str) -> str:
    """Text for a terminal: names out of a file may hold what moves the cursor or turns the line round."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def notes(lines: Iterable[str], *, quiet: bool) -> None:
    """Notes on stderr; what costs fidelity is a warning."""
    for line in () if quiet else lines:
        label = "Warning" if line.startswith(("no --data", "calibrated on")) else "Note"
        say(f"{label}: {line}", err=True)


def refines(entries: Any) -> list[str]:
    """What gradients did, per refinement: the error of the whole model, and how many blocks took part."""
    lines = []
    for entry in entries:
        if entry["block"] != "model":
            continue
        every = [e for e in entries if e["kind"] == entry["kind"] and e["block"] != "model"]
        taken = sum(e["outcome"]["status"] == "ok" for e in every)
        change = "nothing was tried"
        if entry["before"] is not None:
            change = f"held-out error {number(entry['before'], '.2e')} -> {number(entry['after'], '.2e')}"
        grown = f", +{count(entry['added']['params'])} parameters" if entry.get("added") else ""
        blocks = f", {taken} of {len(every)} blocks" if every else ""
        why = f" ({entry['outcome']['reason']})" if entry["outcome"]["reason"] else ""
        lines.append(f"Refine {entry['kind']}: {change}{grown}{blocks}, {entry['seconds']:.0f} s{why}")
    return lines


@contextlib.contextmanager
def progress(*, quiet: bool, no_progress: bool) -> Iterator[Show]:
    """A callable for the library: a bar with ETA on a terminal, lines with --verbose elsewhere, else nothing."""
    verbose = bool(click.get_current_context().meta.get("onnxgrail.verbose"))
    if quiet or no_progress or not sys.stderr.isatty():
        yield _log() if verbose else _nothing
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def _nothing(stage: str, done: int, total: int) -> None:
    del stage, done, total


def _log() -> Show:
    """One line on stderr when a stage begins."""
    seen: set[str] = set()
    start = time.perf_counter()

    def show(stage: str, done: int, total: int) -> None:
        del done
        if stage not in seen:
            seen.add(stage)
            click.echo(f"[{time.perf_counter() - start:7.1f} s] {stage} ({total} steps)", err=True)

    return show
