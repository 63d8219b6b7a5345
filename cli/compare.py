"""`onnxgrail compare`: fidelity and size of one model against another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .parts import close, machine, options, render, values
from .parts.device import resolve_providers
from .parts.help import Grouped
from .parts.progress import progress


@click.command(cls=Grouped, headings={"max_loss": "Checks and report"})
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@options.options_of(
    "compare",
    min_cosine={"help": "Exit 3 if the mean cosine of an output is lower."},
    max_loss={
        "help": "Exit 3 if the upper bound of the loss that compress limits is higher: 1%, 0.005.",
        "otherwise": "",
    },
    latency={"help": "Also time both models on one sample, in turn.", "off": "", "otherwise": ""},
)
def compare(
    *,
    a: Path,
    b: Path,
    device: str | None,
    providers: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **settings: Any,
) -> None:
    """Compare the outputs and the size of B with those of A."""
    import onnxgrail

    settings["providers"] = resolve_providers(device, providers)
    machine.ready("compare")
    with progress(quiet=quiet, no_progress=no_progress) as show:
        result = onnxgrail.compare(a, b, progress=show, **settings)
    render.notes([*_notes(result.calibration), *_hidden(result.latency)], quiet=quiet)
    if as_json:
        click.echo(result.to_json())
    elif not quiet:
        _tables(result)
    for gate in result.gates:
        if not gate.passed:
            side = "below" if gate.name == "min_cosine" else "above"
            option = "--" + gate.name.replace("_", "-")
            value, limit = render.apart(gate.value, gate.limit)
            name = "upper bound of the loss" if gate.name == "max_loss" else gate.name.split("_")[1]
            failed = f"{name} {value} of output {gate.output!r} is {side} {option} {limit}"
            render.say(f"Error: gate failed: {failed}", err=True)
    if not result.gates_passed:
        click.get_current_context().exit(values.EXIT_GATE)


def _notes(calibration: Any) -> list[str]:
    """Return the notes of the reader; the warning about random inputs is replaced by that for a comparison."""
    told = [note for note in calibration["notes"] if not note.startswith("no --data")]
    drawn = "no --data: compared on random inputs, which say little about real ones"
    return [drawn, *told] if calibration["synthetic"] else told


def _hidden(latency: Any) -> list[str]:
    """Return a note if noise hides the difference in latency."""
    hides = latency is not None and latency[-1].hidden
    return ["noise hides the difference in latency: see `onnxgrail bench --seconds`"] if hides else []


def _tables(result: Any) -> None:
    one, two = result.a, result.b
    sizes = [("Parameters", render.count(one.params), render.count(two.params), render.change(one.params, two.params))]
    if one.macs is not None and two.macs is not None:
        sizes.append(("MACs", render.count(one.macs), render.count(two.macs), render.change(one.macs, two.macs)))
    sizes.append(("File size", render.size(one.bytes), render.size(two.bytes), render.change(one.bytes, two.bytes)))
    if result.latency is not None:
        first, second = (time.median for time in result.latency)
        said = result.speed()
        cell = render.quiet(str(said)) if said.silent else str(said)
        sizes.append(("Latency of one run", f"{first:.3g} ms", f"{second:.3g} ms", cell))
    render.table(f"A {one.path}\nB {two.path}", ("", "A", "B", "change"), sizes)
    close.headline(result.headline())
    if line := result.loss_line():
        render.say(f"Loss: {line}")
    for line in result.output_lines():
        render.say(line)
    every = {
        "samples": [str(o.samples) for o in result.outputs],
        "cosine": [render.number(o.cosine, ".5f") for o in result.outputs],
        "NMSE": [render.number(o.nmse, ".3e") for o in result.outputs],
        "max abs": [render.number(o.max_abs, ".3e") for o in result.outputs],
        "agree": [render.share(o.agreement) for o in result.outputs],
        "KL": [render.number(o.kl, ".3e") for o in result.outputs],
        "top-1 A": [render.accuracy(o.top1_reference) for o in result.outputs],
        "top-1 B": [render.accuracy(o.top1) for o in result.outputs],
        "perplexity A": [render.number(o.perplexity_reference, ".3f") for o in result.outputs],
        "perplexity B": [render.number(o.perplexity, ".3f") for o in result.outputs],
        "NaN/inf": [str(o.broken) if o.broken else "-" for o in result.outputs],
    }
    columns = {name: cells for name, cells in every.items() if set(cells) != {"-"}}
    names = [o.name for o in result.outputs]
    render.table("B against A", ("output", *columns), list(zip(names, *columns.values(), strict=True)))
