"""Notes of the report: messages for the user about a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.found import Found
from onnxgrail.calibration.devices.lanes import why_host
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.blocking import channel_block
from onnxgrail.calibration.runtime.provider import left
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import INNER, Change, Recipe
from onnxgrail.graph.flatten.direct import listed_text, shapes_text, unlisted_text, unread_text
from onnxgrail.graph.io.opaque import maps_text
from onnxgrail.graph.io.running.steady import random_ops
from onnxgrail.graph.io.running.widen import has_bfloat16
from onnxgrail.graph.notes import note_bytes
from onnxgrail.graph.rewrite.caches import RANK
from onnxgrail.graph.rewrite.interface import Port
from onnxgrail.narrowing.decide import Decision
from onnxgrail.options import EIGHT, WEIGHTS
from onnxgrail.recipe.selection import named
from onnxgrail.recipe.table import FIELDS
from onnxgrail.recipe.table.option import spelled
from onnxgrail.registry import REDUCERS

LITTLE = 0.01  # share of what a search minimizes, below which it has saved next to nothing
NOTED = 2**10  # bytes of notes from which a report tells that they are gone
LIKELY = 0.7  # mean loss, as a share of the limit, with which more samples may bring the bound below it
MUCH = 1.3  # times what is saved now
FEW = 16  # samples below which a bound of a loss is loose
INTERFACE = "caches and states that are inputs and outputs are narrower: feed and read them at their new sizes"
TURNED = "(caches in a basis of their own are those of this model only: start with empty ones)"
GENAI = "(genai_config.json of onnxruntime-genai holds one head count and one head size for all layers)"
BFLOAT16 = "bfloat16 was measured and checked in float32, since ONNX Runtime has no bfloat16 kernels for the CPU"


def notes_of(
    prepared: Prepared,
    recipe: Recipe,
    decision: Decision,
    budget: Mapping[str, Any] | None,
    ports: Sequence[Port],
    slim: ir.Model | None,
) -> list[str]:
    """Return the notes on a model, its decisions and its budget; an empty string for a note that does not apply.

    Args:
        prepared: the original model and its data.
        recipe: the user's choices.
        decision: the decisions about blocks.
        budget: the target and its achieved value, None without a target.
        ports: inputs and outputs whose shapes have changed.
        slim: the narrowed model, None if nothing was narrowed.
    """
    return [
        _interface(ports, decision),
        *map(str, prepared.trimmed),
        unlisted_text(prepared.unlisted),
        shapes_text(prepared.unlisted),
        unread_text(prepared.model),
        maps_text(prepared.model),
        listed_text(slim) if slim is not None else "",
        decision.allocation.note,
        little(decision.allocation.found, recipe.quantize),
        _ended(recipe, decision.allocation.found),
        more(decision.allocation.found, recipe.quantize),
        _loose(decision.allocation.found),
        _blind(decision.allocation.found, labeled=_labeled(prepared)),
        _unjudged(recipe, decision.allocation.found),
        _missed(budget),
        _early(recipe),
        *idle(recipe),
        empty_caches(prepared, recipe),
        _whole_caches(ports, recipe, slim),
        _unmatched(prepared, recipe),
        _shed(prepared, recipe, slim),
        BFLOAT16 if has_bfloat16(prepared.model) else "",
        _drawn(prepared.model),
        _clamped(decision.changes),
        _unblocked(prepared, recipe, decision),
        _unfitted(decision),
        why_host(recipe.providers),
        left_text(prepared, left()),
    ]


def _drawn(model: ir.Model) -> str:
    """Return a note on a model that draws random numbers."""
    ops = " and ".join(random_ops(model))
    return f"{ops} drew the same numbers for the original and the result; in use they differ" if ops else ""


def empty_caches(prepared: Prepared, recipe: Recipe) -> str:
    """Return a note on caches that are to be narrowed and that the data leave empty."""
    empty = [name for name, array in prepared.feed.items() if array.ndim == RANK and not array.size]
    if not recipe.kv_io or not empty:
        return ""
    return f"--kv-io needs --data with caches that are not empty, as {empty[0]!r} is: nothing follows from it"


def _whole_caches(ports: Sequence[Port], recipe: Recipe, slim: ir.Model | None) -> str:
    """Return a note on an interface that is as large as before although it might be narrowed."""
    if not recipe.kv_io or ports or slim is None:
        return ""
    return "--kv-io: all inputs and outputs keep their sizes; --blocks qk,vo or --blocks heads narrows caches"


def little(found: Found | None, kind: str) -> str:
    """Return a note on a search that saves next to nothing, and on what may save more within the same loss.

    Args:
        found: by the search, None without one.
        kind: of quantization that is asked for already.
    """
    if found is None or found.chosen is None or 1 - found.cost / found.before >= LITTLE:
        return ""
    text = f"less than {LITTLE:.0%} of {found.minimize} goes within --max-loss {100 * found.limit:g}%"
    bits = fewer_bits(found.minimize, kind)
    return f"{text}; {bits}" if bits else text


def fewer_bits(minimize: str, kind: str) -> str:
    """Return the options that give weights fewer bits where a search for widths finds little; empty without any.

    Args:
        minimize: what the search makes small.
        kind: of quantization that is asked for already.
    """
    size = ["--minimize size"] if minimize == "latency" else []
    bits = ["--quantize int8"] if kind == "none" else []
    return f"fewer bits may lose less than fewer units: {' or '.join(size + bits)}" if size or bits else ""


def more(found: Found | None, kind: str = "none") -> str:
    """Return a note on what more samples, or else a larger loss, would save, if it is much more.

    Args:
        found: by the search, None without one.
        kind: of quantization; the search knows the time of float layers.
    """
    if found is None or found.next_cost is None or found.next_limit is None:
        return ""
    now, then = (1 - cost / found.before for cost in (found.cost, found.next_cost))
    of = f"{found.minimize} in float" if found.minimize == "latency" and kind in EIGHT else found.minimize
    if unsure := _unsure(found, now, of):
        return unsure
    if then < MUCH * now or f"{then:.0%}" == f"{now:.0%}":
        return ""
    return f"--max-loss {100 * found.next_limit:.3g}% would save about {then:.0%} of {of}, not {now:.0%}"


def _unsure(found: Found, now: float, of: str) -> str:
    """Return a note on a candidate that saves much more than `now` of a cost, and loses little as far as is known."""
    limit, least = found.limit, found.before * (1 - MUCH * now)
    likely = [one for one in found.tried if one.loss.mean <= LIKELY * limit and limit < one.loss.bound]
    if not likely or (best := min(likely, key=lambda one: one.cost)).cost > least:
        return ""
    loss, saved = best.loss, 1 - best.cost / found.before
    if f"{saved:.0%}" == f"{now:.0%}":
        return ""
    return (
        f"a model that saves {saved:.0%} of {of}, not {now:.0%}, has a loss of {loss.mean:.2%}, which may "
        f"be up to {loss.bound:.2%} on {loss.samples} samples: more samples may allow it"
    )


def idle(recipe: Recipe) -> list[str]:
    """Return notes on choices without an effect, because they need another one."""
    usual = Recipe()
    rounds = recipe.quantize in WEIGHTS or recipe.chooses_bits or recipe.bits is not None
    refined = {*recipe.method, *recipe.refine}
    scored = recipe.reducer in REDUCERS and REDUCERS[recipe.reducer].needs_scores
    needs = {
        "--quantize int4 or int8-weights": () if rounds else ("block_size", "symmetric", "accuracy_level"),
        "--quantize int8, int4 or int8-weights": () if rounds or recipe.quantize == "int8" else ("qdq",),
        "--max-loss": ("minimize",) if recipe.max_loss is None else (),
        "--max-loss or --refine": ("budget_seconds",) if recipe.max_loss is None and not recipe.refine else (),
        "--method grasp": () if "grasp" in refined else tuple(name for name in FIELDS if name.startswith("grasp_")),
        "--method ic": () if "ic" in refined else ("ic_rank",),
        "--compensate best": () if recipe.compensate == "best" else ("fit",),
        "--compensate grail or best": ("ridge",) if recipe.compensate == "none" else (),
        "--reducer prune": () if scored else ("selector",),
    }
    found = []
    for other, names in needs.items():
        given = [spelled(name) for name in names if getattr(recipe, name) != getattr(usual, name)]
        if given:
            found.append(f"{', '.join(given)} {'does' if len(given) == 1 else 'do'} nothing without {other}")
    return found


def _unmatched(prepared: Prepared, recipe: Recipe) -> str:
    """Return a note on an expression that excludes nothing, such as one with a typing error."""
    blocks = prepared.survey.blocks
    if recipe.exclude is None or not blocks or "grail" not in recipe.method:
        return ""
    wanted = named(replace(recipe, include=None))
    every = all(wanted((block.name, *block.nodes)) for block in blocks)
    return f"--exclude {recipe.exclude!r} matches no block and none of its nodes; `inspect` names them" if every else ""


def _ended(recipe: Recipe, found: Found | None) -> str:
    """Return a note on a search that has used up its time."""
    if found is None or not found.ended:
        return ""
    count = len(found.tried)
    return f"--budget-seconds {recipe.budget_seconds:g} was used up: {count} candidate{'s' * (count > 1)} judged"


def _loose(found: Found | None) -> str:
    """Return a note on a bound that few samples make loose."""
    loss = None if found is None else found.loss
    if loss is None or loss.samples >= FEW:
        return ""
    return (
        f"only {loss.samples} samples judge the loss: its mean is {loss.mean:.2%}, its upper bound {loss.bound:.2%}, "
        f"which says little about other data; give {FEW} samples or more"
    )


def _labeled(prepared: Prepared) -> bool:
    """Return True if the samples that judge have labels."""
    held = prepared.held_out
    return (prepared.batches if held is None else held.batches).has_labels


def _blind(found: Found | None, *, labeled: bool) -> str:
    """Return a note on samples that hold nothing, or hardly anything, that a loss could see."""
    loss = None if found is None else found.loss
    if loss is not None and loss.scarce:
        return f"{loss.scarce}: others say more"
    tried = [] if found is None else [one.loss for one in found.tried]
    if loss is None or loss.kind != "metric" or any(one.mean or one.bound > 0 for one in (loss, *tried)):
        return ""
    got = "" if labeled else " (its third argument was None, since the data have no labels)"
    return f"{loss.name} is 0 on all {loss.samples} samples{got}: give samples on which it can lose something"


def _unjudged(recipe: Recipe, found: Found | None) -> str:
    """Return a note on steps that follow the search, whose effect on the loss it does not know."""
    if found is None:
        return ""
    steps = [f"--method {name}" for name in recipe.method if name != "grail"]
    kinds = ",".join(kind for kind in recipe.refine if kind not in recipe.method)
    steps += [f"--refine {kinds}"] if kinds else []
    return f"the loss was measured before {' and '.join(steps)}; Fidelity tells that of the result" if steps else ""


def _unfitted(decision: Decision) -> str:
    """Return a note on layers that were not fitted to the original network."""
    left = [refit for refit in decision.refits if refit.reason]
    if not left:
        return ""
    return f"{len(left)} layers were not fitted to the original network, {left[0].weight} for one: {left[0].reason}"


def _interface(ports: Sequence[Port], decision: Decision) -> str:
    """Return a note on inputs and outputs with other shapes; heads have their count in further files."""
    heads = any(change.block.kind in ("heads", *INNER) for change in decision.changes)
    turned = TURNED if any(port.basis is not None for port in ports) else ""
    return " ".join(text for text in (INTERFACE, turned, GENAI if heads else "") if text) if ports else ""


def _unblocked(prepared: Prepared, recipe: Recipe, decision: Decision) -> str:
    """Return a note on convolutions that do not fill the last block of channels of ONNX Runtime's kernels.

    A search knows what its widths cost, and so does a limit of time. Given widths are the user's own.
    """
    convolved = [c for c in decision.changes if prepared.survey.convolved(c.block)]
    known = decision.allocation.found is not None or recipe.target_latency is not None or recipe.widths is not None
    if not convolved or known or recipe.providers[0] not in CPU:
        return ""
    block = channel_block()
    odd = sum(len(c.reducer.kept) * c.block.unit_size % block > 0 for c in convolved)
    if not odd:
        return ""
    better = f"--round-to {block} may be as fast or faster"
    if recipe.round_to % block == 0:
        better = "another --ratio may be faster: for this one, some blocks need finer steps"
    of = f"{odd} of {len(convolved)} narrowed blocks of convolutions are not multiples"
    which, them = (of, "them") if len(convolved) > 1 else ("the narrowed block of convolutions is no multiple", "it")
    wide = f"{which} of {block} channels wide"
    return f"{wide}: ONNX Runtime computes {them} in blocks of {block} on this machine, so {better}"


def left_text(prepared: Prepared, nodes: Mapping[str, str]) -> str:
    """Return a note on nodes that ran on the CPU although the model runs on a GPU.

    Nodes that compute shapes are left out: ONNX Runtime gives them to the CPU on purpose.

    Args:
        prepared: the original model.
        nodes: operators by name of node.
    """
    facts, named = prepared.survey.facts, [node for node in prepared.model.graph if node.name in nodes]
    shapes = {node.name for node in named if not any(facts.has_floats(v.name or "") for v in node.outputs)}
    counts = Counter(op for name, op in nodes.items() if name not in shapes)
    ops = ", ".join(f"{op} ({count})" for op, count in sorted(counts.items()))
    return f"these nodes ran on the CPU, since ONNX Runtime has no kernels for them on the GPU: {ops}" if ops else ""


def _clamped(changes: Sequence[Change]) -> str:
    """Return a note on new weights that were beyond the range of their number format."""
    count = sum(change.outcome.clamped for change in changes)
    blocks = sum(change.outcome.clamped > 0 for change in changes)
    return f"{count} new weights in {blocks} blocks were clamped to the range of their number format" if count else ""


def _early(recipe: Recipe) -> str:
    """Return a note on a target for the latency that does not know what quantization makes of it."""
    if recipe.target_latency is None or recipe.quantize == "none":
        return ""
    return f"--target-latency is for the model before --quantize {recipe.quantize}; `bench` measures the file"


def _shed(prepared: Prepared, recipe: Recipe, slim: ir.Model | None) -> str:
    """Return a note on what an exporter had noted, which is left out where the size of the file decides."""
    size = note_bytes(prepared.original) if recipe.wants_size and slim is not None else 0
    return f"the file leaves out notes of its exporter, such as stack traces: {size:,} bytes" if size > NOTED else ""


def _missed(budget: Mapping[str, Any] | None) -> str:
    """Return a note if the result exceeds the target, for example because of weights in an external file."""
    if budget is None or budget["metric"] == "latency" or budget["achieved"] <= budget["limit"]:
        return ""
    return f"target missed: {budget['metric']} {budget['achieved']:,.0f} where {budget['limit']:,.0f} was the limit"
