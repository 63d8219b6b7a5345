"""The sections of a report, and the report that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onnxgrail.core import Refusal
from onnxgrail.graph.rewrite.interface import Port
from onnxgrail.machine.extras import version_of
from onnxgrail.machine.job import Job
from onnxgrail.machine.memory import peak_rss_bytes
from onnxgrail.machine.plain import SCHEMA, plain
from onnxgrail.report.environment import environment
from onnxgrail.report.report import ModelChange, Report, Verification


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sections:
    """The contents of a report beside the choices, the environment and the times of its run.

    Attributes:
        model: before and after.
        blocks: from `block_entry`.
        refusals: the channels that were left alone.
        verification: the checks of the result.
        calibration: from `calibration_entry`.
        notes: messages for the user; empty ones are left out.
        interface: inputs and outputs whose shapes changed.
        tables: embedding tables that lost rows.
        allocation: the choice of widths over the blocks, and the cost of rounding them.
        refits: layers fitted to the original network, with errors on held-out rows.
        norms: normalizations fitted to the original's activations.
        refines: fits by gradient, block by block or of the whole model.
        methods: results of methods other than narrowing, by name.
    """

    model: ModelChange
    blocks: Sequence[Mapping[str, Any]] = ()
    refusals: Sequence[Refusal] = ()
    verification: Verification | None = None
    calibration: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    interface: Sequence[Port] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    allocation: Mapping[str, Any] | None = None
    refits: Sequence[Mapping[str, Any]] = ()
    norms: Sequence[Mapping[str, Any]] = ()
    refines: Sequence[Mapping[str, Any]] = ()
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


MEASURED = ("calibration", "allocation", "blocks", "refits", "norms", "refines", "methods")
"""The sections that are written as they are."""


def make_report(job: Job, sections: Sections) -> Report:
    """Return the report of a run in schema 1; `forward` of its times is the time spent inside ONNX Runtime."""
    return Report(
        data={
            "schema": SCHEMA,
            "tool": {"name": "onnxgrail", "version": version_of("onnxgrail")},
            "recipe": plain(asdict(job.recipe)),
            "environment": plain(environment(providers=job.recipe.providers, threads=None)),
            "model": asdict(sections.model),
            **{name: plain(getattr(sections, name)) for name in MEASURED},
            "refusals": [asdict(refusal) for refusal in sections.refusals],
            "verification": plain(asdict(sections.verification or Verification())),
            "interface": plain([port.entry() for port in sections.interface]),
            "tables": plain(list(sections.tables)),
            "expected": plain(job.clock.expected) or None,
            "timing": {stage: round(seconds, 4) for stage, seconds in job.clock.seconds.items()},
            "peak_rss_bytes": peak_rss_bytes(),
            "notes": [note for note in sections.notes if note],
        }
    )
