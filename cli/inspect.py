"""`onnxgrail inspect`: show what can be narrowed, what cannot, and the predicted sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .parts import machine, options, render
from .parts.help import Grouped

EXAMPLES = 3  # nodes named per reason without --verbose


@click.command(cls=Grouped)
@click.argument("model", metavar="IN", type=click.Path(path_type=Path))
@options.options_of(
    "inspect",
    data={"help": "Data in any form that compress takes; two samples are used."},
    report={"help": "Write the result as JSON (.json) or as a page (.html); repeatable.", "also": ("--html",)},
)
def inspect(
    *,
    model: Path,
    as_json: bool,
    **given: Any,
) -> None:
    """Show what can be narrowed, what cannot, and why; needs no data.

    --verbose names the weights of every block and every node that is left alone.  Sizes are per sample of --data, or of
    random inputs, whose shapes --input-shapes sets.
    """
    import onnxgrail

    machine.ready("inspect")
    found = onnxgrail.inspect(model, **given)
    if as_json:
        click.echo(found.to_json())
        return
    verbose = bool(click.get_current_context().meta.get("onnxgrail.verbose"))
    _blocks(found, verbose=verbose)
    _sizes(found)
    _refusals(found, verbose=verbose)
    for note in found.notes:
        render.say(f"Note: {note}")


def _blocks(found: Any, *, verbose: bool) -> None:
    if not found.blocks:
        render.say(f"{found.path}: no block can be narrowed")
        return
    columns = ("block", "kind", "units", "in/out", "params", "MACs")
    rows = [
        (
            block["name"],
            block["kind"],
            str(block["units"]) if block["unit_size"] == 1 else f"{block['units']} x {block['unit_size']}",
            f"{len(block['producers'])}/{len(block['consumers'])}",
            render.short(block["params"]),
            render.short(block["macs"]),
        )
        for block in found.blocks
    ]
    render.table(f"{found.path}: {len(rows)} block{'s' if len(rows) > 1 else ''}", columns, rows, left=2)
    if verbose:
        for block in found.blocks:
            render.say(block["name"])
            render.say(f"  made by {', '.join(block['producers'])}")
            render.say(f"  read by {', '.join(block['consumers'])}")
    else:
        render.say("in/out: weights that make and that read the channels; --verbose names them")


def _sizes(found: Any) -> None:
    rows = [("whole model", render.count(found.params), render.count(found.macs), render.size(found.bytes))]
    for kind, held in found.shares.items():
        label = "held by all blocks" if kind == "all" else f"held by {kind} blocks"
        rows.append((label, render.share(held["params"]), render.share(held["macs"]), ""))
    for guess in found.predicted if found.blocks else ():
        label = f"at --ratio {guess['ratio']:g}"
        rows.append((label, render.count(guess["params"]), render.count(guess["macs"]), render.size(guess["bytes"])))
    render.table("", ("", "params", "MACs", "size"), rows)


def _refusals(found: Any, *, verbose: bool) -> None:
    """Print the reasons of refusals, the most frequent first, each with a few of its nodes."""
    groups: dict[str, list[str]] = {}
    for refusal in found.refusals:
        where = f"{refusal.op} {refusal.node}".strip() or refusal.value
        groups.setdefault(refusal.reason, []).append(where)
    if groups:
        render.say("Channels left alone:")
    elif not found.blocks:
        render.say("It has no channels that one constant weight makes and another reads")
    for reason, places in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        render.say(f"{len(places):5d} x {reason}")
        shown = list(dict.fromkeys(places))
        limit = len(shown) if verbose else EXAMPLES
        for place in shown[:limit]:
            render.say(f"          {place}")
        if len(shown) > limit:
            render.say(f"          and {len(shown) - limit} more (--verbose)")
