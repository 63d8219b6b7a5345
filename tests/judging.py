"""Stand-ins for the judge of a search: killed after some candidates, or recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from onnxgrail.calibration.judge import Judge, Opened
from onnxgrail.fidelity.loss import Loss

Watch = Callable[[int], None]


def _watched(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Call a function before every judgment, with the number of models."""
    found = Judge.loss_of

    def loss_of(judge: Judge, answers: Iterable[Opened], samples: Sequence[int], limit: float = math.inf) -> Loss:
        some = list(answers)
        watch(len(some))
        return found(judge, some, samples, limit)

    monkeypatch.setattr(Judge, "loss_of", loss_of)


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[None]:
    """Interrupt the run inside, which has to get there, at its `at`-th judgment."""
    left = iter(range(at - 1, -1, -1))

    def watch(_: int) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        _watched(patch, watch)
        with pytest.raises(KeyboardInterrupt):
            yield


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of models of every judgment from now on: 1 for a block alone, 2 for two halves."""
    seen = list[int]()
    _watched(monkeypatch, seen.append)
    return seen
