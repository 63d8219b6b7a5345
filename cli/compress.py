"""`onnxgrail compress`: write a smaller model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

from .parts import close, machine, options, render, ship, values
from .parts.device import resolve_providers
from .parts.help import Grouped
from .parts.progress import progress

REASONS = 8  # lines in the list of refusals; the report has all
COMMON = (
    "max_loss",
    "ratio",
    "exclude",
    "data",
    "tokenizer",
    "quantize",
    "output",
    "force",
    "report",
    "device",
)


@click.command(cls=Grouped, common=COMMON)
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@options.options_of("compress")
def compress(
    *,
    model: Path,
    out: Path | None,
    output: Path | None,
    device: str | None,
    providers: tuple[str, ...],
    report: tuple[Path, ...],
    latency: bool | None,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **recipe: Any,
) -> None:
    """Write a smaller model that stays close to IN, a model or an exported folder.

    Prints a before/after table, or the report with --json. Of a folder (Optimum, transformers.js, GenAI) all models
    are compressed, and the rest is copied.
    """
    import onnxgrail

    written, folder = options.one_output(out, output), model.is_dir()
    options.only_one(recipe)
    options.keeps(recipe["resume"])
    recipe = options.chosen(recipe) | measured(latency, report, recipe)
    recipe["providers"] = resolve_providers(device, providers)
    machine.ready("compress", "join")
    with onnxgrail.join(providers=recipe["providers"]) as group:
        follows = group.rank > 0
        try:
            with progress(quiet=quiet or follows, no_progress=no_progress) as show:
                recipe |= {"report": report, "group": group, "progress": show}
                result: Any = (onnxgrail.compress_folder if folder else onnxgrail.compress)(model, written, **recipe)
        except onnxgrail.NothingToCompressError as error:
            if as_json and isinstance(error.report, onnxgrail.Report) and not follows:
                click.echo(error.report.to_json())
            raise
    if not follows:
        (finish_folder if folder else finish)(result, as_json=as_json, quiet=quiet)


def finish(result: Any, *, as_json: bool, quiet: bool) -> None:
    """Print the result of a run as tables or JSON, and exit with the code of its gates."""
    if as_json:
        click.echo(result.report.to_json())
    _told(result, tables=not as_json, quiet=quiet)
    _exit(result)


def finish_folder(result: Any, *, as_json: bool, quiet: bool) -> None:
    """Print the results of all models of a folder, and exit with the code of their gates."""
    if as_json:
        click.echo(result.to_json())
    for one in result.results.values():
        _told(one, tables=not as_json, quiet=quiet)
    if not as_json and not quiet:
        for line in result.lines():
            render.say(line)
        render.written(result.output)
    _exit(result)


def _told(result: Any, *, tables: bool, quiet: bool) -> None:
    """Print notes and tables of a model, and the gates that failed."""
    data = result.report.data
    render.notes([*notes(data), *result.report.advice()], quiet=quiet)
    if tables and not quiet:
        show(result.report, result.output)
    if not result.gates_passed:
        for gate in (*ship.gates(data), *_gate(data)):
            render.say(f"Error: gate failed: {gate}", err=True)


def _exit(result: Any) -> None:
    if not result.gates_passed:
        click.get_current_context().exit(values.EXIT_GATE)


def measured(latency: bool | None, reports: tuple[Path, ...], asked: Any) -> dict[str, bool | None]:
    """Return the measurements for the report: those requested; by default latency and cheap curves for a page."""
    page, curves = any(path.suffix.lower() != ".json" for path in reports), asked["curves"]
    return {"latency": page if latency is None else latency, "curves": False if curves is None and not page else curves}


def notes(data: Any) -> list[str]:
    """Return the notes of a report."""
    calibration = data.get("calibration") or {}
    return list(dict.fromkeys([*calibration.get("notes", ()), *data.get("notes", ())]))


def _gate(data: Any) -> list[str]:
    limit = data["recipe"]["min_cosine"]
    if limit is None:
        return []
    last = data.get("quantization") or data["verification"]
    checks = (last.get("held_out") or last)["outputs"]
    cosines = [(o["cosine"], o["name"]) for o in checks if o["cosine"] is not None]
    if not cosines:
        return [f"no output to hold against --min-cosine {limit}"]
    value, name = min(cosines)
    found, least = render.apart(value, limit)
    return [f"cosine {found} of output {name!r} is below --min-cosine {least}"] if value < limit else []


def show(report: Any, output: object) -> None:
    """Print the tables of a run; `output` is the file that was written, None in a dry run."""
    data, model = report.data, report.data["model"]
    chosen = _of_kinds(report, data["recipe"]["blocks"] if _narrows(data) else ())
    render.sizes(model["input"], chosen.summary_rows())
    close.headline(report.headline())
    ship.latency(data.get("latency"), report.speed())
    for line in (
        *report.asked_lines(),
        *_allocated(data),
        *_interface(data.get("interface", ())),
        *_norms(data.get("norms", ())),
        *_grasp(data.get("methods", {}).get("grasp")),
        *render.refines(data.get("refines", ())),
    ):
        render.say(line)
    calibration = data.get("calibration")
    if calibration:
        render.say(f"Calibration: {render.several(calibration['samples'], 'sample')}, {calibration['source']}")
    for line in (*report.output_lines(), *ship.lines(data)):
        render.say(line)
    _outcomes(chosen)
    render.written(output)


def _norms(entries: Any) -> list[str]:
    """Return the number of fitted normalizations, by kind."""
    taken = Counter(e["kind"] for e in entries if e["outcome"]["status"] == "ok")
    every = Counter(e["kind"] for e in entries)
    return [f"Norms: {taken[kind]} of {count} places: {kind}" for kind, count in every.items()]


def _narrows(data: Any) -> bool:
    """Return True if blocks were narrowed; reports of early versions have no method, and all narrowed."""
    return "grail" in data["recipe"].get("method", ("grail",))


def _grasp(entry: Any) -> list[str]:
    """Return a line on the layers with low-rank matrices."""
    if entry is None:
        return []
    layers = [e for e in entry["layers"] if e["replaced"]]
    kept = sum(m["params_after"] for m in entry["matrices"])
    whole = sum(m["params_before"] for m in entry["matrices"])
    named = ", ".join(f"{e['name']} (cosine {render.number(e['redundancy'], '.3f')})" for e in layers)
    share = f", {render.share(kept / whole)} of their parameters stay" if whole else ""
    return [f"GRASP: {len(entry['matrices'])} matrices of {named or 'no layer'}{share}"]


def _allocated(data: Any) -> list[str]:
    """Return lines on the allocation of widths, unless it is the default or uniform, and on the cost of rounding."""
    allocation = data.get("allocation")
    if not allocation:
        return []
    lines = []
    if allocation["asked"] not in ("auto", "uniform"):
        lines.append(f"Allocation: asked {allocation['asked']}, used {allocation['used']}")
    narrowed = [row for row in allocation["rounding"] if row["kept"] < row["units"]]
    rounded = [row for row in narrowed if abs(row["asked"] - row["kept"]) >= 0.5]
    if rounded and data["recipe"]["round_to"] > 1:
        total = sum(row["params"] for row in rounded)
        more = f"{abs(total):,} parameters {'more' if total >= 0 else 'fewer'}"
        option = f"--round-to {data['recipe']['round_to']}"
        lines.append(f"Widths rounded ({option}): {render.several(len(rounded), 'block')}, {more} than without")
    finer = Counter(row["multiple"] for row in narrowed if row["multiple"] < data["recipe"]["round_to"])
    if finer and not data["recipe"].get("widths"):
        steps = ", ".join(f"{render.several(times, 'block')} by {step}" for step, times in sorted(finer.items()))
        lines.append(f"Finer steps, where {data['recipe']['round_to']} is too coarse for a block or the total: {steps}")
    return lines


def _interface(ports: Any) -> list[str]:
    """Return a line per group of inputs and outputs that changed in the same way."""
    alike: dict[tuple[int, int, int, bool], list[str]] = {}
    for port in ports:
        alike.setdefault((port["axis"], port["before"], port["after"], port["own_basis"]), []).append(port["name"])
    lines = []
    for (axis, before, after, turned), names in alike.items():
        basis = ", in a basis of its own" if turned else ""
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"Interface: {', '.join(names[:2])}{more}: {before} -> {after} (axis {axis}{basis})")
    return lines


def _of_kinds(report: Any, kinds: Collection[str]) -> Any:
    """Return the report restricted to blocks of these kinds."""
    import onnxgrail

    blocks = [block for block in report.data["blocks"] if block["kind"] in kinds]
    return onnxgrail.Report(data={**report.data, "blocks": blocks})


def _outcomes(report: Any) -> None:
    """Print the outcomes of blocks other than ok, and the refusals, by reason."""
    for text, times in report.outcome_counts():
        render.say(f"{render.several(times, 'block')} {text}")
    counts = report.refusal_counts()
    if counts:
        render.say("Channels left alone:")
        for reason, times in counts[:REASONS]:
            render.say(f"  {times:4d} x {reason}")
        if len(counts) > REASONS:
            render.say(f"  and {len(counts) - REASONS} more reasons (see --report or `onnxgrail inspect`)")
