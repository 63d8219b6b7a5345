"""Encodes a fit as a record, so that an interrupted run can be resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnxgrail.core import Array, Outcome
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.methods.refine.refinement import Refined

Fit = tuple[Refined, Mapping[str, Array]]
"""The report entry of a fit, and the new weights."""


def _encode(fit: Fit) -> Record:
    entry, arrays = fit
    return Record(arrays=arrays, notes={"entry": dataclasses.asdict(entry)})


def _decode(record: Record) -> Fit:
    fields = record.notes["entry"]
    return Refined(**{**fields, "outcome": Outcome(**fields["outcome"])}), record.arrays


FIT: Codec[Fit] = Codec(_encode, _decode)
