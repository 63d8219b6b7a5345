"""How a fit is stored, so that a killed run goes on where it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnxgrail.core import Array, Outcome
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Codec
from onnxgrail.methods.refine.refinement import Refined

Fit = tuple[Refined, Mapping[str, Array]]
"""The entry of a fit for the report, and its new numbers."""


def _encode(fit: Fit) -> Record:
    entry, arrays = fit
    return Record(arrays=arrays, notes={"entry": dataclasses.asdict(entry)})


def _decode(record: Record) -> Fit:
    fields = record.notes["entry"]
    return Refined(**{**fields, "outcome": Outcome(**fields["outcome"])}), record.arrays


FIT: Codec[Fit] = Codec(_encode, _decode)
