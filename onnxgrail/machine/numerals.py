"""Whole numbers written by users."""

from __future__ import annotations

LONGEST = 18  # digits: more do not fit into 64 bits


def whole(text: str) -> int | None:
    """Return the number that a text is, None if it is not a number of at most 18 digits without a sign."""
    digits = text.strip()
    return int(digits) if digits.isdecimal() and len(digits) <= LONGEST else None
