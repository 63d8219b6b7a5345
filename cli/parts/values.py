"""Functions that parse the values of options."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

EXIT_GATE = 3
LONGEST = 80  # characters of a value in a message


def ratio(value: Any) -> float:
    """Parse a share R with 0 <= R < 1, a number or a percentage."""
    text = str(value).strip()
    try:
        number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number: choose 0 <= R < 1, such as 0.3 or 30%") from None
    if math.isnan(number) or not 0 <= number < 1:
        why = "1.0 would remove everything" if number == 1 else f"{value} is out of range"
        raise click.BadParameter(f"{why}: choose 0 <= R < 1, such as 0.3 or 30%")
    return number


def floats(value: Any) -> tuple[float, ...]:
    """Parse a comma-separated list of numbers."""
    try:
        found = tuple(float(part) for part in str(value).split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or not all(map(math.isfinite, found)):
        raise click.BadParameter(f"{value!r} is not a number, or several as 0.485,0.456,0.406")
    return found


def regex(value: Any) -> str:
    """Check a regular expression, and return it as text."""
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise click.BadParameter(f"{short(value)} is not a regular expression: {why}") from None
    return str(value)


def shape(value: Any) -> tuple[str, tuple[int, ...]]:
    """Parse `name:1,3,224,224`, `name:1x3x224x224` or `name:[1,3,224,224]` into name and dimensions."""
    name, colon, text = str(value).rpartition(":")  # names may contain a colon
    dims = text.strip().removeprefix("[").removesuffix("]")
    try:
        sizes = tuple(int(part) for part in re.split(r"[,x]", dims)) if dims else ()
    except ValueError:
        sizes = (0,)
    if not colon or not name or min(sizes, default=1) < 1:
        raise click.BadParameter(f"{short(value)} is not NAME:1,3,224,224 (or 1x3x224x224, or [1,3,224,224])")
    return name, sizes


def content(known: tuple[str, ...]) -> Callable[[Any], tuple[str, str]]:
    """Return a parser of `name=word`, where the word is one of `known`."""

    def parse(value: Any) -> tuple[str, str]:
        name, _, word = str(value).rpartition("=")
        if not name or word not in known:
            raise click.BadParameter(f"{short(value)} is not NAME=CONTENT, with one of {', '.join(known)}")
        return name, word

    return parse


def short(value: Any) -> str:
    """Return a user's text for a message, shortened if it is long."""
    text = str(value)
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")


def words(known: tuple[str, ...], empty: str) -> Callable[[Any], tuple[str, ...]]:
    """Return a parser of comma-separated words.

    Args:
        known: the allowed words.
        empty: word for none of them; if it is empty, at least one is required.
    """

    def parse(value: Any) -> tuple[str, ...]:
        found = [part.strip() for part in str(value).split(",") if part.strip()]
        if found == [empty]:
            return ()
        unknown = [word for word in found if word not in known]
        if unknown or not (found or empty):
            told = ", ".join(unknown) or "nothing"
            raise click.BadParameter(f"{told!r}: choose from {', '.join(known)}")
        return tuple(dict.fromkeys(found))

    return parse


def device(value: Any) -> str:
    """Check `cpu`, `cuda`, or `cuda:` with the numbers of GPUs."""
    text = str(value).strip().lower()
    if not re.fullmatch(r"cpu|cuda(:\d+(,\d+)*)?", text):
        raise click.BadParameter(f"{value!r}: choose cpu, cuda, cuda:1, or cuda:0,1 for two processes")
    return text


def report_file(value: Any) -> Path:
    """Parse the path of a report file, and check its suffix."""
    path = Path(value)
    if path.suffix.lower() not in (".json", ".html", ".htm"):
        raise click.BadParameter(f"{str(path)!r}: reports are written as .json or .html")
    return path
