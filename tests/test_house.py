"""The layout of the code stays within its limits."""

from __future__ import annotations

import pytest

from bench.house import measure

HELD = measure()
OPEN = {"lines": 1}
"""Limits that do not hold yet, and how many places are beyond them: these numbers only fall."""


@pytest.mark.parametrize("name", HELD)
def test_limit(name: str) -> None:
    beyond = HELD[name]["beyond"]
    assert len(beyond) <= OPEN.get(name, 0), beyond
