"""Two reports side by side: tables for a terminal, and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnxgrail.fidelity.words import extent, headline_of, speed, value
from onnxgrail.report.page.blockmap import titled
from onnxgrail.report.page.brief import asked, plain
from onnxgrail.report.page.command import options_of
from onnxgrail.report.page.hero import brand, overview, title_of
from onnxgrail.report.page.html import drawing, figures
from onnxgrail.report.page.html.markup import Child, Markup, el, join, name
from onnxgrail.report.page.html.table import controls, framed, section, sortable, table
from onnxgrail.report.page.network import BlockRow, blocks_of, rows_of
from onnxgrail.report.page.outputs import named
from onnxgrail.report.summary import Table, judged, summary_rows

Data = Mapping[str, Any]
SIDES = ("A", "B")
COLUMNS = ("", "Original", *SIDES, "B against A")
SIZES = 3  # rows of the summary that are sizes of the model; those after them count units by kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Both:
    """A block of both reports, None where one has no block of this name."""

    a: BlockRow | None
    b: BlockRow | None

    @property
    def any(self) -> BlockRow:
        """Return the block of the first report that has it."""
        found = self.a or self.b
        assert found is not None
        return found

    @property
    def differs(self) -> bool:
        """Return True if the reports decided differently."""
        return self.a is None or self.b is None or self.a.kept != self.b.kept


def tables(a: Data, b: Data) -> tuple[Table, ...]:
    """Return the tables as text: results, then options and blocks that differ; those without rows are left out."""
    differing = [
        (one.any.name, one.any.kind, *(_kept(side) for side in (one.a, one.b)), *_errors(one))
        for one in blocks(a, b)
        if one.differs
    ]
    found = (
        Table(title="", columns=COLUMNS, words=1, rows=tuple(sizes(a, b))),
        Table(title="Results", columns=("", *SIDES), words=3, rows=tuple(results(a, b))),
        Table(title="Options that differ", columns=("", *SIDES), words=3, rows=tuple(choices(a, b))),
        Table(
            title="Blocks that differ",
            columns=("block", "kind", *SIDES, "error A", "error B"),
            words=2,
            rows=tuple(differing),
        ),
    )
    return tuple(replace(one, rows=tuple(tuple(map(plain, row)) for row in one.rows)) for one in found if one.rows)


def notes(a: Data, b: Data) -> tuple[str, ...]:
    """Return what hinders comparing the numbers: other originals, samples, machines."""
    found = []
    if a["model"].get("sha256_before") != b["model"].get("sha256_before"):
        found.append("The originals are not the same file: sizes and losses refer to each one's own original.")
    samples = [_judged(data) for data in (a, b)]
    if samples[0] != samples[1]:
        found.append(f"Other samples judge: A {samples[0]}, B {samples[1]}.")
    if all(data.get("latency") for data in (a, b)):
        found.append("The times were measured in two runs: compare the speedups, not the milliseconds.")
    return tuple(found)


def sizes(a: Data, b: Data) -> list[tuple[str, ...]]:
    """Return sizes of the original and of both results; the original's is left out if there are two originals."""
    found: list[tuple[str, ...]] = []
    for one, two in zip(summary_rows(a)[:SIZES], summary_rows(b)[:SIZES], strict=True):
        show = figures.SHOW[one.unit]
        before = show(one.before) if one.before == two.before else figures.NONE
        found.append((one.label, before, show(one.after), show(two.after), figures.change(one.after, two.after)))
    return found


def results(a: Data, b: Data) -> list[tuple[str, ...]]:
    """Return what was asked and achieved, the verdict on the worst output and the speedup, in words."""
    rows = [("Asked", *("; ".join(asked(data)) for data in (a, b)))]
    rows.append(("Fidelity", *(_words(headline_of(data)) for data in (a, b))))
    rows.append(("Speed", *(_words(speed(data.get("latency") or ())) for data in (a, b))))
    return [row for row in rows if set(row[1:]) != {figures.NONE}]


def choices(a: Data, b: Data) -> list[tuple[str, ...]]:
    """Return the options that differ, as on the command line; a dash stands for the default."""
    one, two = map(_options, (a, b))
    names = dict.fromkeys([*one, *two])
    rows = [(option, one.get(option, figures.NONE), two.get(option, figures.NONE)) for option in names]
    return [row for row in rows if row[1] != row[2]]


def _options(data: Data) -> dict[str, str]:
    """Return the values of a recipe's options as on the command line; some occur several times."""
    found: dict[str, str] = {}
    for option, *words in options_of(data.get("recipe") or {}):
        found[option] = " ".join(filter(None, (found.get(option), *words))) or "given"
    return found


def blocks(a: Data, b: Data) -> list[Both]:
    """Return the blocks of both, in the order of the network of `a`; those that only `b` has come last."""
    one, two = ({block.name: block for block in blocks_of(rows_of(data))} for data in (a, b))
    return [Both(a=one.get(key), b=two.get(key)) for key in dict.fromkeys([*one, *two])]


def title(a: Data, b: Data) -> str:
    """Return the names of the files that were written, or read in a dry run."""
    return " and ".join(title_of(str(data["model"].get("output") or data["model"]["input"])) for data in (a, b))


def header(a: Data, b: Data) -> Markup:
    """Return the top of the page: both results side by side."""
    told = [el("li", note) for note in notes(a, b)]
    return el(
        "header",
        brand("two reports"),
        el("h1", name(title(a, b))),
        el("ul", *told, class_="lead") if told else None,
        el("div", *(_side(side, data) for side, data in zip(SIDES, (a, b), strict=True)), class_="sides"),
    )


def sections(a: Data, b: Data) -> list[Markup | None]:
    """Return the sections of the page."""
    options = choices(a, b)
    return [
        section("sizes", "Sizes", table("Sizes of the models", COLUMNS, sizes(a, b), class_="numbers")),
        section(
            "results",
            "Results",
            table("Each against its own original", ("", *SIDES), results(a, b), class_="facts stacked"),
        ),
        _outputs(a, b),
        section("options", "Options", table("Options that differ", ("", *SIDES), options, class_="facts stacked"))
        if options
        else None,
        _blocks(blocks(a, b)),
    ]


def _side(side: str, data: Data) -> Markup:
    """Return the overview of one report; its heading names the file that was written."""
    heading = el("h2", f"{side}: ", name(str(data["model"].get("output") or "dry run")))
    return el("div", heading, *overview(data), role="group", aria_label=f"Report {side}")


def _judged(data: Data) -> str:
    told = (data.get("verification") or {}).get("judged") or {}
    return f"{told.get('samples', 'no')} samples ({told.get('on', 'none')}, {told.get('source', figures.NONE)})"


def _words(found: object) -> str:
    return figures.NONE if found is None else str(found)


def _kept(block: BlockRow | None) -> str:
    return figures.NONE if block is None else f"{block.kept:,} of {block.units:,}"


def _errors(one: Both) -> tuple[str, str]:
    first, second = (figures.NONE if side is None else figures.error(side.error) for side in (one.a, one.b))
    return first, second


def _outputs(a: Data, b: Data) -> Markup | None:
    """Return the section with the verdicts on each output; None if there are none."""
    one, two = ({(o["name"], v["part"]): v for o in judged(data) for v in o.get("verdicts") or ()} for data in (a, b))
    rows = [(named(*key), *(_verdict(side.get(key)) for side in (one, two))) for key in dict.fromkeys([*one, *two])]
    if not rows:
        return None
    caption = "Each output by the measure that suits what it holds, with 95 % intervals"
    return section("fidelity", "Output fidelity", table(caption, ("Output", *SIDES), rows, class_="stacked verdicts"))


def _verdict(verdict: Data | None) -> Child:
    if verdict is None:
        return figures.NONE
    more = f"{verdict['measure']}; {extent(verdict)}" if extent(verdict) else str(verdict["measure"])
    return join((figures.words(value(verdict)), el("span", figures.words(more), class_="sub")))


def _blocks(every: Sequence[Both]) -> Markup | None:
    """Return the section with all blocks, those that differ first marked in words."""
    if not every:
        return None
    columns = ("Block", *SIDES, "Error A", "Error B")
    caption = "Width and error of each block; a bar is the width that stays"
    widest = max(side.width for one in every for side in (one.a, one.b) if side is not None)
    rows = (_row(one, widest) for one in every)
    orders = {"change": "difference", "name": "name", "width": "width", "error": "error of B"}
    return section(
        "blocks",
        "Blocks",
        controls("block-rows", [one.any.kind_name for one in every], orders),
        framed(caption, columns, rows, class_="plain stacked pairs", identity="block-rows"),
        long=True,
    )


def _row(one: Both, widest: int) -> Markup:
    known = one.any
    cells = [(side, _width(block, widest)) for side, block in zip(SIDES, (one.a, one.b), strict=True)]
    cells += list(zip(("Error A", "Error B"), _errors(one), strict=True))
    shares = [0.0 if side is None else side.share for side in (one.a, one.b)]
    return el(
        "tr",
        el("th", titled(known), scope="row", role="rowheader"),
        *(el("td", cell, data_label=label, role="cell") for label, cell in cells),
        role="row",
        data_kind=known.kind_name,
        data_name=known.name,
        **sortable(change=abs(shares[0] - shares[1]), width=known.width, error=one.b.error if one.b else None),
    )


def _width(block: BlockRow | None, widest: int) -> Child:
    if block is None:
        return "no such block"
    return join((_kept(block), drawing.lying(block, widest)))
