"""Stand-ins for the judge of a search: killed after some candidates, or recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onnxgrail.calibration.judge import Judge


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[None]:
    """Interrupt the run inside, which has to get there, at its `at`-th judgment."""
    usual, left = Judge.loss, iter(range(at - 1, -1, -1))

    def loss(judge: Judge, *candidates: Any) -> Any:
        if next(left) == 0:
            raise KeyboardInterrupt
        return usual(judge, *candidates)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "loss", loss)
        with pytest.raises(KeyboardInterrupt):
            yield


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of models of every judgment from now on: 1 for a block alone, 2 for two halves."""
    usual, seen = Judge.loss, list[int]()
    monkeypatch.setattr(Judge, "loss", lambda judge, *c: (seen.append(len(c)), usual(judge, *c))[1])
    return seen
