"""Format numbers for the page: a true minus sign, and a unit that stays on the line of its number."""

from __future__ import annotations

import re

MINUS, SPACE = "\u2212", "\u00a0"
NONE = "\u2013"  # shown if there is no number
PLURALS = {"matrix": "matrices"}  # of nouns that need more than an s


def count(value: float | None) -> str:
    """Format a count in three or four digits: 1,234 or 21.3 M."""
    if value is None:
        return NONE
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f}{SPACE}{letter}"
    return f"{value:,.0f}".replace("-", MINUS)


def size(value: float | None) -> str:
    """Format bytes: 812 B, 3.40 MB."""
    if value is None:
        return NONE
    for limit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.2f}{SPACE}{letter}"
    return f"{value:.0f}{SPACE}B"


SHOW = {"count": count, "bytes": size}
"""Formats of the numbers of a summary, by their unit."""


def change(before: float | None, after: float | None) -> str:
    """Format a relative change: −29.1 %."""
    if before is None or after is None or before == 0:
        return NONE
    percent = round(100 * (after - before) / before, 1)
    return f"{percent:+.1f}{SPACE}%".replace("-", MINUS) if percent else f"0.0{SPACE}%"


def share(value: float | None, digits: int = 1) -> str:
    """Format a share: 41.0 %."""
    return NONE if value is None else f"{value:.{digits}%}".replace("%", f"{SPACE}%")


def error(value: float | None) -> str:
    """Format a relative error in two or three digits: 25.3 %, 0.31 %, 0.0048 %, 1.2e-07."""
    if value is None:
        return NONE
    if value == 0:
        return f"0{SPACE}%"
    if value < 1e-6:
        return f"{value:.1e}".replace("-", MINUS)
    if value < 1e-3:  # a fixed number of decimals would leave one digit or none
        return f"{100 * value:.2g}{SPACE}%"
    return f"{value:.{1 if value >= 0.0995 else 2}%}".replace("%", f"{SPACE}%")


def number(value: float | None, spec: str = ".3g") -> str:
    """Format a number; a dash for None."""
    return NONE if value is None else format(value, spec).replace("-", MINUS)


def seconds(value: float | None) -> str:
    """Format a time: 24.4 s, 12 ms."""
    if value is None:
        return NONE
    if value >= 90:
        return f"{value / 60:.1f}{SPACE}min"
    return f"{value:.1f}{SPACE}s" if value >= 1 else f"{value * 1e3:.0f}{SPACE}ms"


def milliseconds(value: float | None) -> str:
    """Format a time in milliseconds: 8.21 ms."""
    return f"{number(value)}{SPACE}ms"


def plural(number_: int, noun: str) -> str:
    """Format a count with its noun: 1 block, 12 blocks, 2 matrices."""
    return f"{number_:,} {noun if number_ == 1 else PLURALS.get(noun, f'{noun}s')}"


def words(text: str) -> str:
    """Format the numbers in a sentence for the page."""
    return re.sub(r"(?<![\w.])-(?=\d)", MINUS, text).replace(" %", f"{SPACE}%")
