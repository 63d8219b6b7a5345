"""Cuts of the original model with its activations there, for many walks over the same feeds that begin at one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.stream.sizes import bytes_left, scale_of
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Feed
from onnxgrail.graph.cost.counting import effort
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.rewrite import weights

WORTH = 0.06  # share of the work of a run that a cut has to save beside an earlier one


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A place where walks begin, with the functions that make its feeds and the bytes that it takes."""

    feeds: tuple[Callable[[], Feed], ...]
    place: Beginning
    size: int


class Beginnings:
    """The cuts of a model where walks over some feeds begin, up to a number of bytes; those used last stay."""

    def __init__(self, prepared: Prepared, providers: Sequence[str], room: int) -> None:
        self._prepared, self._providers, self._room = prepared, tuple(providers), room
        self._untouched = weights.empty(prepared.survey)
        self._lives = lives(prepared.model, prepared.survey.facts, effort(prepared.model, prepared.survey))
        self._held: list[_Held] = []

    def before(self, batches: Batches, position: int) -> Beginning | None:
        """Return a cut at most just before a node; None if runs from the feeds on cost little more, or it is too large.

        Args:
            batches: the feeds.
            position: of the first node that may differ from the original model's.
        """
        able = [held for held in self._held if held.feeds == batches.feeds and held.place.position <= position]
        last = max(able, key=lambda held: held.place.position, default=None)
        start, work = 0 if last is None else last.place.position, self._lives.work
        target = self._lives.best(start, position)
        if work[target] - work[start] > WORTH * work[-1]:
            last = self._walked(batches, target, last) or last
        if last is None:
            return None
        self._held = [*(held for held in self._held if held is not last), last]
        return last.place

    def _walked(self, batches: Batches, target: int, last: _Held | None) -> _Held | None:
        """Return the beginning at a cut, for which others are dropped; None if there is not enough room for it."""
        survey = self._prepared.survey
        scale = scale_of(batches, survey) if last is None else last.place.scale
        size = sum(bytes_left(survey, name, self._untouched, scale) for name in self._lives.at(target))
        if size > self._room:
            return None
        while sum(held.size for held in self._held) + size > self._room:
            del self._held[0]
        part = replace(self._prepared, batches=batches)
        with Stream(part, providers=self._providers, beginning=None if last is None else last.place) as stream:
            stream.advance(self._untouched, target)
            place = stream.place()
            # What a session gives may be a part of an arena, which would stay as a whole.
            own = tuple({name: array.copy() for name, array in found.items()} for found in place.tensors)
            return _Held(batches.feeds, replace(place, tensors=own), size)
