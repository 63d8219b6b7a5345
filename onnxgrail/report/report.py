"""The report: JSON of schema 1, the single source for the text table, the page and other tools."""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxgrail.core import Refusal
from onnxgrail.errors import ModelError
from onnxgrail.fidelity.lines import report_lines
from onnxgrail.fidelity.words import Headline, Speed, advice, headline_of, speed
from onnxgrail.machine.files.paths import Read, check_input, check_output, check_targets, write_text
from onnxgrail.machine.plain import SCHEMA, Plain, plain
from onnxgrail.report.readback import reads, undamaged, whole
from onnxgrail.report.summary import SummaryRow, Table, outcome_counts, refusal_counts, summary_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChange:
    """The model before and after: elements, multiply-accumulates per sample, bytes on disk (external data included).

    `*_after` are predictions in a dry run, and then `output` and `sha256_after` are None.  Ratios are shares removed.
    `asked_ratio` (None if a target was given) and `achieved_ratio` refer to the same total, which `ratio_of` names
    (`blocks`: the parameters in blocks that can be narrowed; `units`: their channels, neurons and heads; `layers`: the
    parameters in layers of which GRASP can replace matrices; `model`: all parameters); `ratio_total` is its value.
    `model_ratio` always refers to all parameters.  `sha256_data_*` are of files with weights, by name.  `budget` holds
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
    """The checks of the written file: None for a check that was not requested.

    Attributes:
        checker: the ONNX checker accepts it.
        ort_load: ONNX Runtime loads it.
        outputs: per output at least name, cosine, nmse, max_abs and verdicts compared with the original (see
            `fidelity.entries`), on the samples that judge.
        held_out: asked, source, samples and outputs if the samples are held out from all fits, else None.
        judged: the origin of the samples that judge: on (`held-out`, `calibration` or `random`), asked, source,
            samples.
        headline: the verdict on the worst output, with its name as `output`.
    """

    checker: bool | None = None
    ort_load: bool | None = None
    outputs: tuple[Mapping[str, Any], ...] = ()
    held_out: Mapping[str, Any] | None = None
    judged: Mapping[str, Any] | None = None
    headline: Mapping[str, Any] | None = None


class Saved(Plain):
    """A result that is written as a page or as JSON."""

    __slots__ = ()

    def to_html(self) -> str:
        """Return one self-contained HTML file."""
        raise NotImplementedError

    def _reads(self) -> list[Read]:
        """Return the files that the run has read, none of which is replaced."""
        raise NotImplementedError

    @whole
    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write it, whole or not at all: as a page if the suffix is .html, else as JSON.

        Args:
            path: file to write.
            force: an existing file may be replaced.

        Raises:
            OutputError: the file exists and `force` is not given, the run has read it, or it cannot be written.
        """
        target = Path(path)
        check_targets([("report", target)], self._reads())
        check_output(target, force=force, what="report")
        page = target.suffix.lower() in (".html", ".htm")
        write_text(target, self.to_html() if page else self.to_json() + "\n")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Report(Saved):
    """The data of a report in schema 1; if it was `read_back` from JSON, its values are not trusted.

    `path` is the file it was read from.
    """

    data: Mapping[str, Any]
    read_back: bool = False
    path: Path | None = None

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(self.data)

    def _reads(self) -> list[Read]:
        """Return the files that the run has read, and the file of the report: none of them is replaced."""
        own = [] if self.path is None else [Read(path=self.path, what="the report that is read")]
        return [*reads(self.data), *own]

    @whole
    def to_html(self) -> str:
        """Return the report as one self-contained HTML file."""
        from onnxgrail.report import page  # slow to import

        return page.report_page(plain(self.data))

    @whole
    def summary_rows(self) -> tuple[SummaryRow, ...]:
        """Return the before/after table."""
        return summary_rows(self.data)

    @whole
    def headline(self) -> Headline | None:
        """Return the verdict on the worst output in words, with its caveat; None if nothing was compared."""
        return headline_of(self.data)

    @whole
    def advice(self) -> tuple[str, ...]:
        """Return a note on a result that is far from the original, with the options that help; empty if it is near."""
        return tuple(advice(self.data))

    @whole
    def asked_lines(self) -> tuple[str, ...]:
        """Return the requested and the achieved sizes and losses, one line each."""
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
        """Return further lines on the outputs."""
        return report_lines(self.data)

    @whole
    def speed(self) -> Speed | None:
        """Return the speedup over the original; None if it was not measured."""
        return speed(self.data.get("latency") or ())

    @whole
    def refusal_counts(self) -> tuple[tuple[str, int], ...]:
        """Return the reasons of refusals with their counts, the most frequent first."""
        return refusal_counts(self.data["refusals"])

    @whole
    def outcome_counts(self) -> tuple[tuple[str, int], ...]:
        """Return the outcomes of blocks other than ok, in words, with their counts."""
        return outcome_counts(self.data["blocks"])

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which damage of a report that was read back raises a `ModelError`."""
        return undamaged(read_back=self.read_back)

    def beside(self, other: Report) -> Pair:
        """Return this report side by side with another one."""
        return Pair(a=self, b=other)

    @staticmethod
    def read(path: str | Path) -> Report:
        """Read a report from its JSON file.

        Raises:
            ModelError: there is no such file, or it is not a report of this schema.
        """
        place = Path(path)
        check_input(place, hint="Give the JSON that --report FILE.json wrote")
        try:
            found = Report.from_json(place.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ModelError(f"{str(place)!r} is not a report: {error}") from error
        except ModelError as error:
            raise ModelError(f"{str(place)!r} is {error}") from error
        return Report(data=found.data, read_back=True, path=place)

    @staticmethod
    def from_json(text: str) -> Report:
        """Read a report from JSON.

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
        if "recipe" not in data and "verification" not in data:  # that of another command
            raise ModelError(
                f"not a report of `compress` or `refine`: it has {', '.join(map(repr, data)) or 'no keys'}"
            )
        return Report(data=data, read_back=True)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair(Saved):
    """Two reports side by side: `a`, and `b` that is compared with it."""

    a: Report
    b: Report

    @property
    def read_back(self) -> bool:
        """Return True if the values of one of them are not trusted."""
        return self.a.read_back or self.b.read_back

    @whole
    def tables(self) -> tuple[Table, ...]:
        """Return the tables: results, then options and blocks that differ."""
        from onnxgrail.report.page import beside  # slow to import, as above

        return beside.tables(self.a.data, self.b.data)

    @whole
    def notes(self) -> tuple[str, ...]:
        """Return what the reader has to know before comparing the numbers."""
        from onnxgrail.report.page import beside

        return beside.notes(self.a.data, self.b.data)

    @whole
    def to_html(self) -> str:
        """Return both as one self-contained HTML file."""
        from onnxgrail.report import page

        return page.pair_page(plain(self.a.data), plain(self.b.data))

    def to_data(self) -> dict[str, Any]:
        """Return both as plain data."""
        return {"schema": SCHEMA, "a": self.a.data, "b": self.b.data}

    def _reads(self) -> list[Read]:
        return [*self.a._reads(), *self.b._reads()]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inspection(Saved):
    """The parts of a model that can be narrowed, found without data.

    Attributes:
        path: the model file; params, macs, bytes: its size (elements, multiply-accumulates per sample, bytes on disk).
        blocks: dicts of name, kind, units, unit_size, span (positions of its first and last node), producers, consumers
            (names), nodes (names of those that read its weights), params, macs (those of the block).
        refusals: the channels that cannot be narrowed, with node and reason.
        shares: per kind, and for all kinds together, {params, macs}: the share of the whole model in its blocks,
            0 to 1 (a weight between blocks of two kinds counts for both).
        predicted: dicts of ratio, params, macs, bytes.
        notes: messages for the user.
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

    def to_html(self) -> str:
        """Return one self-contained HTML file."""
        from onnxgrail.report import page

        return page.inspection_page(plain(self.to_data()))

    def _reads(self) -> list[Read]:
        return [Read(path=Path(self.path), what="the model")]
