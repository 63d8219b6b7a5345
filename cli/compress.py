"""`onnxgrail compress`: write a smaller model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

from .parts import close, machine, options, render, ship, values
from .parts.device import device_options, resolve_providers
from .parts.help import Grouped
from .parts.plugged import Plugged
from .parts.progress import progress

REASONS = 8  # lines in the list of refusals; the report has all
COMMON = ("ratio", "target_size", "exclude", "data", "tokenizer", "quantize", "output", "force", "reports", "device")


@click.command(cls=Grouped, common=COMMON)
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write.  [default: IN.compressed.onnx]")
@click.option("--force", is_flag=True, help=options.FORCE)
@click.option(
    "--ratio",
    type=values.ratio,
    metavar="R",
    default=0.3,
    show_default=True,
    help="Share to remove of the parameters in blocks that can be narrowed.",
)
@click.option(
    "--unit-ratio",
    type=values.ratio,
    metavar="R",
    help="Instead of --ratio: share to remove of the channels, neurons and heads of every block, as papers count.",
)
@options.budget_options
@click.option("--sparsity", type=values.ratio, metavar="R", hidden=True, help="Same as --ratio.")
@click.option(
    "--blocks",
    type=values.blocks,
    metavar="KINDS",
    default=",".join(values.BLOCKS),
    show_default=True,
    help="Kinds of blocks to narrow: conv, mlp, heads, stream (the channels that residual connections share).",
)
@click.option("--include", type=values.regex, metavar="REGEX", help="Narrow only blocks whose name or nodes match.")
@click.option("--exclude", type=values.regex, metavar="REGEX", help="Do not narrow blocks whose name or nodes match.")
@options.data_options
@options.held_out_option
@options.reading_options
@click.option(
    "--selector",
    type=Plugged(values.SELECTORS, "onnxgrail.selectors"),
    default="wanda",
    show_default=True,
    help="Criterion that ranks channels, neurons and heads.",
)
@click.option(
    "--reducer",
    type=click.Choice(values.REDUCERS),
    default="prune",
    show_default=True,
    help="Remove channels, neurons and heads (prune), or merge them (fold).",
)
@click.option(
    "--compensate",
    type=Plugged(values.COMPENSATORS, "onnxgrail.compensators"),
    default="best",
    show_default=True,
    help="Compensation of the remaining weights: as in the GRAIL paper (grail), fitted to the original network (best), "
    "or none.",
)
@click.option(
    "--fit",
    type=values.fits,
    metavar="PARTS",
    default=",".join(values.FITS),
    show_default=True,
    help="Parts of best: ridge towards the current weights (prior), fitted biases (affine), step length chosen on "
    "held-out samples (blend), fit of layers downstream that lost nothing (behind), whole windows of convolutions "
    "(patch); or none of them (plain).",
)
@click.option(
    "--norms",
    type=click.Choice(values.NORMS),
    default="none",
    show_default=True,
    help="Afterwards restore the statistics of activations: mean and deviation after convolutions (repair), or fit "
    "scale and bias of normalizations by least squares (refit).",
)
@click.option(
    "--closed-loop/--open-loop",
    default=False,
    show_default=True,
    help="Measure each block in the network narrowed so far, or in the original model, as --compensate best does.",
)
@click.option(
    "--round-to",
    type=click.IntRange(min=1),
    metavar="N",
    default=8,
    show_default=True,
    help="Keep multiples of this number if the width allows it; 1 turns it off.",
)
@options.method_options
@options.refine_options
@options.stats_options
@options.cache_option
@ship.ship_options
@options.kv_io_option
@options.listed_option
@device_options
@click.option("--check/--no-check", default=True, show_default=True, help="Compare the result with the original.")
@options.min_cosine_option
@options.report_option
@options.latency_option
@options.curves_option
@options.external_option("as IN has them")
@options.resume_option
@click.option("--dry-run", is_flag=True, help="Show what would be done; write no model.")
@options.talk_options
def compress(
    *,
    model: Path,
    target: Path | None,
    output: Path | None,
    sparsity: float | None,
    device: str | None,
    providers: tuple[str, ...],
    input_shapes: tuple[tuple[str, tuple[int, ...]], ...],
    reports: tuple[Path, ...],
    latency: bool | None,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **recipe: Any,
) -> None:
    """Write a smaller model that stays close to IN.

    Prints a before/after table, or the report with --json.
    """
    import onnxgrail

    written = options.one_output(target, output)
    options.only_one(click.get_current_context(), recipe)
    if sparsity is not None:
        recipe["ratio"] = sparsity
    recipe["providers"] = resolve_providers(device, providers)
    recipe["input_shapes"], recipe["target"] = dict(input_shapes), recipe.pop("runtime")
    recipe |= measured(latency, reports, recipe)
    options.keeps(recipe["resume"])
    machine.ready("compress", "join")
    with onnxgrail.join(providers=recipe["providers"]) as group:
        follows = group.rank > 0
        try:
            with progress(quiet=quiet or follows, no_progress=no_progress) as show:
                result = onnxgrail.compress(model, written, report=reports, group=group, progress=show, **recipe)
        except onnxgrail.NothingToCompressError as error:
            if as_json and isinstance(error.report, onnxgrail.Report) and not follows:
                click.echo(error.report.to_json())
            raise
    if not follows:
        finish(result, as_json=as_json, quiet=quiet)


def finish(result: Any, *, as_json: bool, quiet: bool) -> None:
    """Print the result of a run as tables or JSON, and exit with the code of its gates."""
    data = result.report.data
    if as_json:
        click.echo(result.report.to_json())
    render.notes([*_notes(data), *close.advice(result.report.headline())], quiet=quiet)
    if not as_json and not quiet:
        _tables(result.report, result.output)
    if not result.gates_passed:
        for gate in (*ship.gates(data), *_gate(data)):
            render.say(f"Error: gate failed: {gate}", err=True)
        click.get_current_context().exit(values.EXIT_GATE)


def measured(latency: bool | None, reports: tuple[Path, ...], asked: Any) -> dict[str, bool | None]:
    """Return the measurements for the report: those requested; by default latency and cheap curves for a page."""
    page, curves = any(path.suffix.lower() != ".json" for path in reports), asked["curves"]
    return {"latency": page if latency is None else latency, "curves": False if curves is None and not page else curves}


def _notes(data: Any) -> list[str]:
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
    return [f"cosine {value:.5f} of output {name!r} is below --min-cosine {limit}"] if value < limit else []


def _tables(report: Any, output: Path | None) -> None:
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
    """Return lines on the allocation of widths, unless it is uniform, and on the cost of rounding."""
    allocation = data.get("allocation")
    if not allocation:
        return []
    lines = []
    if allocation["asked"] != "uniform":
        used, errors = allocation["used"], allocation["errors"]
        judged = ", ".join(f"{name} {error:.2e}" for name, error in errors.items() if error is not None)
        lines.append(f"Allocation: asked {allocation['asked']}, used {used}" + (f" (NMSE {judged})" if judged else ""))
    narrowed = [row for row in allocation["rounding"] if row["kept"] < row["units"]]
    rounded = [row for row in narrowed if abs(row["asked"] - row["kept"]) >= 0.5]
    if rounded:
        total = sum(row["params"] for row in rounded)
        more = f"{abs(total):,} parameters {'more' if total >= 0 else 'fewer'}"
        option = f"--round-to {data['recipe']['round_to']}"
        lines.append(f"Widths rounded ({option}): {render.several(len(rounded), 'block')}, {more} than without")
    finer = Counter(row["multiple"] for row in narrowed if row["multiple"] < data["recipe"]["round_to"])
    if finer:
        steps = ", ".join(f"{render.several(times, 'block')} by {step}" for step, times in sorted(finer.items()))
        lines.append(f"Finer steps, where {data['recipe']['round_to']} is too coarse for a block or the total: {steps}")
    return lines


def _interface(ports: Any) -> list[str]:
    """Return a line per group of inputs and outputs that changed in the same way."""
    alike: dict[tuple[int, int, int], list[str]] = {}
    for port in ports:
        alike.setdefault((port["axis"], port["before"], port["after"]), []).append(port["name"])
    lines = []
    for (axis, before, after), names in alike.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"Interface: {', '.join(names[:2])}{more}: {before} -> {after} heads (axis {axis})")
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
