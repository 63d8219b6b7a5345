"""Numbers to text: tables on stdout, progress and notes on stderr."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import click

WIDTH = 140  # of tables that go to a file or a pipe
SHORTEST = 12  # characters that a name in a table keeps on the narrowest terminal


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

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    cells = fitting([[type(cell)(printable(cell)) for cell in row] for row in rows], columns, left, console.width)
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for position, name in enumerate(columns):
        text = position < left
        grid.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for row in cells:
        grid.add_row(*(Text(cell, style="dim" if isinstance(cell, Quiet) else "") for cell in row))  # not markup
    for line in title.splitlines():
        say(line)
    console.print(grid)


class Quiet(str):
    """Text of a table that says nothing, printed dim."""

    __slots__ = ()


def quiet(text: str) -> Quiet:
    """Return text that is printed dim in a table."""
    return Quiet(text)


def fitting(rows: Sequence[Sequence[str]], columns: Sequence[str], left: int, width: int) -> list[list[str]]:
    """Return the rows with words of the first `left` columns shortened where they would be broken at this width.

    The end of a name says more than its beginning, so an ellipsis takes the place of the beginning.
    """
    widest = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    gaps = 3 * (len(columns) - 1) + 2
    room = max(SHORTEST, (width - gaps - sum(widest[left:])) // left)
    free = sum(room - w for w in widest[:left] if w < room)  # narrow columns leave their room to the others
    return [[*(shortened(cell, room + free) for cell in row[:left]), *row[left:]] for row in rows]


def shortened(text: str, room: int) -> str:
    """Return text whose words have at most `room` characters: of longer ones the end stays."""
    return " ".join(word if len(word) <= room else "…" + word[-(room - 1) :] for word in text.split(" "))


def say(line: str, *, err: bool = False, dim: bool = False) -> None:
    """Print a line in which names out of a file may stand; a terminal never breaks it inside a word.

    A line that says nothing is `dim`.
    """
    text = printable(line)
    stream = sys.stderr if err else sys.stdout
    if stream is not None and stream.isatty():
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        lines = textwrap.wrap(
            text,
            shutil.get_terminal_size().columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        text = "\n".join(lines)
    click.secho(text, err=err, dim=dim or None)


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
