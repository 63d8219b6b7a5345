"""The frontier of a model: points with their losses and costs, as JSON, as a page, and as files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onnxgrail.allocation.found import Judged
from onnxgrail.errors import NothingToCompressError, UsageError
from onnxgrail.machine.extras import version_of
from onnxgrail.machine.files.paths import Read
from onnxgrail.machine.plain import SCHEMA, plain
from onnxgrail.narrowing.frontier import Costs
from onnxgrail.recipe.keywords import portion, read_as
from onnxgrail.report.report import Saved
from onnxgrail.report.result import Result
from onnxgrail.report.summary import loss_name, seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point of a frontier: widths and bits, their loss, and the costs of a model with them.

    Attributes:
        number: from 1, by falling cost.
        widths: block name to the units that stay; a later point has no wider block.
        bits: weight to its bits, if the file size decides and weights may have fewer; 32 if it keeps its numbers.
        predicted: loss that the losses of single blocks predict.
        loss: measured: its mean, its one-sided 95 % upper bound, counted agreement and the samples that judged.
        costs: parameters, multiply-accumulates per sample, bytes of the file, and modeled milliseconds per run.
        command: writes the model of this point.
    """

    number: int
    widths: Mapping[str, int]
    bits: Mapping[str, int]
    predicted: float
    loss: Judged
    costs: Costs
    command: str


def measured(points: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return a name for the agreements of all points, and what their losses are: the worst output may differ.

    Args:
        points: the losses, as mappings.
    """
    every = list(points)
    names = {"agreement" if loss["agreement"]["counted"] else loss["agreement"]["measure"] for loss in every}
    of = (loss_name(loss) + (f" of output {loss['output']}" if loss["output"] else "") for loss in every)
    count = every[0]["samples"]
    losses = " or ".join(dict.fromkeys(of))
    return names.pop() if len(names) == 1 else "agreement", f"{losses} on {count:,} sample{'s' * (count != 1)}"


def named(agreement: Mapping[str, Any], heading: str) -> str:
    """Return the name of an agreement that is not counted, with a space, if the heading of its column is another."""
    measure: str = agreement["measure"]
    return "" if agreement["counted"] or measure == heading else f"{measure.partition(' about ')[0]} "


Write = Callable[[Point, str | Path | None, bool], Result]
"""Writes the model of a point to a file, which may be replaced if the last argument is True."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Frontier(Saved):
    """The loss of a model against its costs, at nested widths.

    Attributes:
        model: path of the original, or `model`.
        before: costs of the original.
        points: by falling cost; every point can be written as a file.
        minimize: the cost that falls by a like share from each point to the next.
        crossed: True if every sample was judged by a fit without it.
        choices: of the recipe that all points share.
        calibration: source and samples of the data.
        judged: the samples that judge, as in the report of a run.
        notes: messages for the user.
        written: the model of a picked point; None if none was picked.
    """

    model: str
    before: Costs
    points: tuple[Point, ...]
    minimize: str
    crossed: bool
    choices: Mapping[str, Any]
    calibration: Mapping[str, Any]
    judged: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    written: Result | None = None
    write: Write = field(compare=False)

    @property
    def measured(self) -> tuple[str, str]:
        """Return a name for the agreements of all points, and what their losses are."""
        return measured(asdict(point.loss) for point in self.points)

    @property
    def how(self) -> str:
        """Return in words if fits have seen the samples that judge."""
        return seen(self.judged, crossed=self.crossed)

    def agreed(self, point: Point) -> str:
        """Return the name of a point's agreement, with a space, where the heading of all does not tell it."""
        return named(point.loss.agreement, self.measured[0])

    def point(self, pick: float | str) -> Point:
        """Return a point by its number, or the smallest one within a loss.

        Args:
            pick: a whole number, or a loss between 0 and 1, which may be a text such as 1%; the upper bound of the
                loss has to hold.

        Raises:
            UsageError: there is no point of this number; the message lists all.
            NothingToCompressError: no point is within the loss; the message lists all.
        """
        number, limit = picked(pick)
        every = ", ".join(f"{p.number} ({p.loss.bound:.2%})" for p in self.points)
        hint = f"Points, with the upper bounds of their losses: {every}"
        if number is not None and not 1 <= number <= len(self.points):
            raise UsageError(f"there is no point {number}", hint=hint)
        if number is not None:
            return self.points[number - 1]
        most = limit or 0.0
        within = [point for point in self.points if point.loss.bound <= most]
        if not within:
            raise NothingToCompressError(f"no point has a loss of at most {100 * most:.4g}%", hint=hint)
        return within[-1]

    def pick(self, pick: float | str, output: str | Path | None = None, *, force: bool = False) -> Result:
        """Write the model of a point, as `compress` does with its widths.

        Args:
            pick: see `point`.
            output: as for `compress`.
            force: an existing file may be replaced.

        Raises:
            OnnxGrailError: all errors of `point` and of `compress`.
        """
        return self.write(self.point(pick), output, force)

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        data: dict[str, Any] = plain(
            {
                "schema": SCHEMA,
                "tool": {"name": "onnxgrail", "version": version_of("onnxgrail")},
                "model": {"input": self.model, **asdict(self.before)},
                "minimize": self.minimize,
                "crossed": self.crossed,
                "choices": self.choices,
                "calibration": self.calibration,
                "judged": self.judged,
                "points": [_entry(point) for point in self.points],
                "notes": self.notes,
            }
        )
        return data

    def to_html(self) -> str:
        """Return one self-contained HTML file with plots and a table."""
        from onnxgrail.report import page  # slow to import

        return str(page.frontier_page(self.to_data()))

    def _reads(self) -> list[Read]:
        return [Read(path=Path(self.model), what="the model")]

    def __repr__(self) -> str:
        lines = (
            f"{p.number}: loss {p.loss.mean:.2%} (at most {p.loss.bound:.2%}), {p.costs.params:,} parameters"
            for p in self.points
        )
        return "\n".join([f"Frontier of {self.model}: {self.before.params:,} parameters", *lines])


def picked(pick: float | str) -> tuple[int | None, float | None]:
    """Return the number of a point and None, or None and a loss.

    Raises:
        UsageError: it is neither.
    """
    text = str(pick).strip()
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return int(text), None
    loss = read_as(portion, "pick", text)
    if not 0 < loss < 1:
        raise UsageError(f"pick is {str(pick)[:80]!r}", hint="Give the number of a point, or a loss such as 1%")
    return None, loss


def _entry(point: Point) -> dict[str, Any]:
    """Return the plain data of a point."""
    found = asdict(point)
    return {
        **{name: found[name] for name in ("number", "predicted", "loss")},
        **found["costs"],
        **{name: found[name] for name in ("command", "widths", "bits")},
    }
