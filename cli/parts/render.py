"""Format numbers as text, and print tables on stdout and notes on stderr."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import click

WIDTH = 140  # of tables that go to a file or a pipe
SHORTEST = 12  # minimum characters of a name in a table on the narrowest terminal


def count(value: float | None) -> str:
    """Format a count: 1,234 or 21.3 M."""
    if value is None:
        return "-"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {letter}"
    return f"{value:,.0f}"


def size(value: float | None) -> str:
    """Format bytes: 812 B, 3.4 MB."""
    if value is None:
        return "-"
    for limit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {letter}"
    return f"{value:.0f} B"


def change(before: float | None, after: float | None) -> str:
    """Format a relative change: -29.1 %."""
    if before is None or after is None or before == 0:
        return "-"
    return f"{(after - before) / before:+.1%}".replace("%", " %")


def share(value: float | None) -> str:
    """Format a share: 41.0 %."""
    return "-" if value is None else f"{value:.1%}".replace("%", " %")


def number(value: float | None, spec: str = ".4f") -> str:
    """Format a number; a dash for None."""
    return "-" if value is None else format(value, spec)


def several(number: int, what: str) -> str:
    """Format a count with its noun: 1 sample, 8 samples."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def short(value: float | None) -> str:
    """Format a count in three digits: 812, 49.2 k, 1.18 M."""
    if value is None:
        return "-"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:#.3g} {letter}".replace(". ", " ")
    return f"{value:.0f}"


def accuracy(value: float | None) -> str:
    """Format an accuracy: 98.75 %."""
    return "-" if value is None else f"{value:.2%}".replace("%", " %")


def sizes(title: str, rows: Iterable[Any]) -> None:
    """Print the sizes of a model before and after: the report's summary rows."""
    printers = {"count": count, "bytes": size}
    cells = []
    for row in rows:
        show = printers[row.unit]
        cells.append((row.label, show(row.before), show(row.after), change(row.before, row.after)))
    table(title, ("", "before", "after", "change"), cells)


def written(output: Any) -> None:
    """Print the path of the written model."""
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
    """Text of a table without significance, printed dim."""

    __slots__ = ()


def quiet(text: str) -> Quiet:
    """Return text that is printed dim in a table."""
    return Quiet(text)


def fitting(rows: Sequence[Sequence[str]], columns: Sequence[str], left: int, width: int) -> list[list[str]]:
    """Return the rows with the words of the first `left` columns shortened to the width of the table.

    The end of a name is more specific than its beginning, so an ellipsis replaces the beginning.
    """
    widest = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    gaps = 3 * (len(columns) - 1) + 2
    room = max(SHORTEST, (width - gaps - sum(widest[left:])) // left)
    free = sum(room - w for w in widest[:left] if w < room)  # narrow columns leave their space to the others
    return [[*(shortened(cell, room + free) for cell in row[:left]), *row[left:]] for row in rows]


def shortened(text: str, room: int) -> str:
    """Return text with words of at most `room` characters: a longer word keeps its end."""
    return " ".join(word if len(word) <= room else "…" + word[-(room - 1) :] for word in text.split(" "))


def say(line: str, *, err: bool = False, dim: bool = False) -> None:
    """Print a line that may contain names from a file; it is never wrapped inside a word.

    Args:
        line: the line.
        err: print on stderr.
        dim: print dim, for a line without significance.
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
    """Return text with escaped control characters: names from a file may move the cursor or reverse the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def notes(lines: Iterable[str], *, quiet: bool) -> None:
    """Print notes on stderr; a note on a loss of fidelity is labeled a warning."""
    for line in () if quiet else lines:
        label = "Warning" if line.startswith(("no --data", "calibrated on")) else "Note"
        say(f"{label}: {line}", err=True)


def apart(value: float, limit: float) -> tuple[str, str]:
    """Format a number and its limit with as many digits as show on which side of it the number is: 5 or more."""
    found = (f"{value:.{digits}g}" for digits in range(5, 18))
    shown = (text for text in found if float(text) != limit and (float(text) < limit) is (value < limit))
    return next(shown, f"{value}"), f"{limit:.15g}"


def refines(entries: Any) -> list[str]:
    """Return a line per refinement: the error of the whole model, and the number of blocks that took part."""
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
