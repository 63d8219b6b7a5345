"""The report: JSON of schema 1, the one source for the text table and anybody's tooling."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxgrail.core import Refusal
from onnxgrail.errors import ModelError
from onnxgrail.fidelity.lines import report_lines
from onnxgrail.fidelity.words import Headline, Speed, headline_of, speed
from onnxgrail.machine.files.paths import Read, check_output, check_targets, write_text
from onnxgrail.machine.plain import SCHEMA, plain, to_json
from onnxgrail.report.readback import reads, whole
from onnxgrail.report.summary import SummaryRow, outcome_counts, refusal_counts, summary_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChange:
    """The model before and after: elements, multiply-accumulates per sample, bytes on disk (external data included).

    `*_after` are predictions in a dry run, and then `output` and `sha256_after` are None.  Ratios are shares removed.
    `asked_ratio` (None where a target ruled) and `achieved_ratio` are of the same: `ratio_of` says of what (`blocks`:
    the parameters in blocks that can be narrowed; `units`: their channels, neurons and heads; `layers`: the parameters
    in layers of which GRASP can replace matrices; `model`: all parameters), and `ratio_total` how many these are.
    `model_ratio` is always of all parameters.  `sha256_data_*` are of files with weights, by name.  `budget` holds
    metric (params, macs, size in bytes, latency in milliseconds), asked (as written), before, limit and achieved.
    """

    input: str
    output: str | None
    sha256_before: str
    sha256_after: str | None
    params_before: int
    params_after: int
    macs_before: int | None
    macs_after: int | None
    bytes_before: int
    bytes_after: int | None
    asked_ratio: float | None
    achieved_ratio: float
    ratio_of: str
    ratio_total: int
    model_ratio: float
    sha256_data_before: Mapping[str, str] = field(default_factory=dict)
    sha256_data_after: Mapping[str, str] = field(default_factory=dict)
    budget: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What was checked on the written file: None for a check that was not asked for.

    Attributes:
        checker: the ONNX checker accepts it.
        ort_load: ONNX Runtime loads it.
        outputs: per output at least name, cosine, nmse, max_abs and verdicts against the original (see
            `fidelity.entries`), on the samples that judge.
        held_out: asked, source, samples and outputs where these are samples that nothing was fitted to, else None.
        judged: what the samples are that judge: on (`held-out`, `calibration` or `random`), asked, source, samples.
        headline: the verdict on the worst output, with its name as `output`.
    """

    checker: bool | None = None
    ort_load: bool | None = None
    outputs: tuple[Mapping[str, Any], ...] = ()
    held_out: Mapping[str, Any] | None = None
    judged: Mapping[str, Any] | None = None
    headline: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Report:
    """Plain data in the shape of schema 1; `read_back` from a file, where they may be anything."""

    data: Mapping[str, Any]
    read_back: bool = False

    def to_json(self) -> str:
        """The report as indented JSON; NaN and infinity become null."""
        return to_json(self.data)

    @whole
    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the report, whole or not at all: as a page where the suffix is .html, else as JSON.

        Raises:
            OutputError: the file exists and `force` is not given, it is what the run has read, or it cannot be written.
        """
        path = Path(path)
        check_targets([("report", path)], reads(self.data))
        check_output(path, force=force, what="report")
        write_text(path, self.to_html() if is_page(path) else self.to_json() + "\n")

    @whole
    def to_html(self) -> str:
        """The report as one HTML file that needs nothing else."""
        from onnxgrail.report import page  # slow to import

        return page.report_page(plain(self.data))

    @whole
    def summary_rows(self) -> tuple[SummaryRow, ...]:
        """The before/after table."""
        return summary_rows(self.data)

    @whole
    def headline(self) -> Headline | None:
        """The verdict on the worst output in words, with what it is worth; None where nothing was compared."""
        return headline_of(self.data)

    @whole
    def asked_lines(self) -> tuple[str, ...]:
        """What was asked for and achieved, one thing per line."""
        from onnxgrail.report.page import brief

        return brief.asked(self.data)

    def __repr__(self) -> str:
        try:
            return self._brief("text")
        except ModelError as error:
            return str(error)

    def _repr_html_(self) -> str:
        try:
            return self._brief("html")
        except ModelError as error:
            return html.escape(str(error))

    @whole
    def _brief(self, form: str) -> str:
        from onnxgrail.report.page import brief  # slow to import, as above

        return str(getattr(brief, form)(self.data, self.headline(), self.speed()))

    @whole
    def output_lines(self) -> tuple[str, ...]:
        """What else is told of the outputs, a line each."""
        return report_lines(self.data)

    @whole
    def speed(self) -> Speed | None:
        """How many times as fast the result is as the original; None where that was not measured."""
        return speed(self.data.get("latency") or ())

    @whole
    def refusal_counts(self) -> tuple[tuple[str, int], ...]:
        """Reasons with how often each occurs, the most frequent first."""
        return refusal_counts(self.data["refusals"])

    @whole
    def outcome_counts(self) -> tuple[tuple[str, int], ...]:
        """How blocks went that did not go as asked, in words, with how many did."""
        return outcome_counts(self.data["blocks"])

    @staticmethod
    def from_json(text: str) -> Report:
        """Read a report back.

        Raises:
            ModelError: not a report of this schema.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"not a report: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ModelError(f"not a report of schema {SCHEMA}: got {got!r}")
        return Report(data=data, read_back=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inspection:
    """What can be narrowed in a model, without data.

    Attributes:
        path: the model file; params, macs, bytes: its size (elements, multiply-accumulates per sample, bytes on disk).
        blocks: dicts of name, kind, units, unit_size, span (positions of its first and last node), producers, consumers
            (names), params, macs (what it holds).
        refusals: what is left alone, with node and reason.
        shares: per kind, and for all of them together, {params, macs}: the share of the whole model that its blocks
            hold, 0 to 1 (a weight between blocks of two kinds counts for both).
        predicted: dicts of ratio, params, macs, bytes.
        notes: what the user should know.
    """

    path: str
    params: int
    macs: int | None
    bytes: int
    blocks: tuple[Mapping[str, Any], ...]
    refusals: tuple[Refusal, ...]
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    predicted: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """As plain data."""
        return {"schema": SCHEMA} | asdict(self)

    def to_json(self) -> str:
        """As indented JSON."""
        return to_json(self.to_data())

    def to_html(self) -> str:
        """As one HTML file that needs nothing else."""
        from onnxgrail.report import page

        return page.inspection_page(plain(self.to_data()))

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write it, whole or not at all: as a page where the suffix is .html, else as JSON.

        Raises:
            OutputError: the file exists and `force` is not given, it is the model, or it cannot be written.
        """
        path = Path(path)
        check_targets([("report", path)], [Read(path=Path(self.path), what="the model")])
        check_output(path, force=force, what="report")
        write_text(path, self.to_html() if is_page(path) else self.to_json() + "\n")


def is_page(path: Path) -> bool:
    """Whether a report of this name is a page for a browser."""
    return path.suffix.lower() in (".html", ".htm")
