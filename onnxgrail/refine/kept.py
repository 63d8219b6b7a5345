"""A fit as a step of a run that may be killed: what was found is kept, and not fitted again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from onnxgrail.core import Array, Outcome
from onnxgrail.journal import Journal
from onnxgrail.record import Record
from onnxgrail.refine.job import Refined

Found = tuple[Refined, Mapping[str, Array]]


def kept(journal: Journal, key: str, fitted: Callable[[], Found]) -> Found:
    """The entry of a fit and its new numbers, from the journal where they are known."""
    known = journal.get(f"refine {key}")
    if known is not None:
        return _entry(known), known.arrays
    entry, arrays = fitted()
    journal.put(f"refine {key}", Record(arrays=arrays, notes={"entry": dataclasses.asdict(entry)}))
    return entry, arrays


def _entry(record: Record) -> Refined:
    fields = record.notes["entry"]
    return Refined(**{**fields, "outcome": Outcome(**fields["outcome"])})
