"""Summaries of a report: the before/after table, outcomes and reasons of refusals."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgrail.core import Refusal
from onnxgrail.options import WITHOUT_DATA

KINDS = {  # words for a kind, the noun for its units, and a label for all of them
    "conv": ("convolution", "channel", "Convolution channels"),
    "mlp": ("MLP", "neuron", "MLP neurons"),
    "heads": ("attention", "head", "Attention heads"),
    "qk": ("queries and keys", "channel", "Channels of queries and keys"),
    "vo": ("values", "channel", "Channels of values"),
    "stream": ("residual stream", "channel", "Residual stream channels"),
    "embedding": ("embedding", "channel", "Embedding channels"),
    "rank": ("low rank", "channel", "Low-rank channels"),
}
SHARES = {
    "blocks": "parameters in blocks that can be narrowed",
    "units": "channels, neurons and heads",
    "layers": "parameters in layers that can be replaced",
}
MEASURED = re.compile(r"\b\d\.\de[+-]\d\d\b")  # a number in a reason, as of a proof
OUTCOMES = {
    "damped": "repaired more cautiously than asked",
    "plain": "narrowed without repair",
    "skipped": "left at full width",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryRow:
    """A line of the before/after table, with raw numbers; `unit` (count or bytes) determines their format."""

    label: str
    before: float | None
    after: float | None
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text: its title, its columns, how many of them hold words, and its rows."""

    title: str
    columns: tuple[str, ...]
    words: int
    rows: tuple[tuple[str, ...], ...]


def summary_rows(data: Mapping[str, Any]) -> tuple[SummaryRow, ...]:
    """Return the before/after table of a report's data: sizes, then the units per kind."""
    model = data["model"]
    rows = [
        SummaryRow(label="Parameters", before=model["params_before"], after=model["params_after"], unit="count"),
        SummaryRow(label="MACs", before=model["macs_before"], after=model["macs_after"], unit="count"),
        SummaryRow(label="File size", before=model["bytes_before"], after=model["bytes_after"], unit="bytes"),
    ]
    for kind in dict.fromkeys(block["kind"] for block in data["blocks"]):
        blocks = [block for block in data["blocks"] if block["kind"] == kind]
        cut = sum(block["kept"] < block["units"] for block in blocks)
        of = f"{cut} of {len(blocks)} block{'' if len(blocks) == 1 else 's'} narrowed"
        units = KINDS[kind][2] if kind in KINDS else f"Units of {kind} blocks"
        label = f"{units} ({of})"
        before, after = (sum(block[key] for block in blocks) for key in ("units", "kept"))
        rows.append(SummaryRow(label=label, before=before, after=after, unit="count"))
    return tuple(rows)


def judged(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the fidelity of each output of the written model: on held-out samples if there were any."""
    last = data.get("quantization") or data.get("verification") or {}
    return tuple((last.get("held_out") or last).get("outputs") or ())


def loss_of(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the loss of the result if a search limited it: as written, or as found where only that judges fits fairly.

    Samples that judge in turn, each a fit without it, have been seen by the fits of the file: the higher loss counts.
    """
    search = (data.get("allocation") or {}).get("search")
    if not search or search["chosen"] is None:
        return None
    found: Mapping[str, Any] = search["tried"][search["chosen"]]["loss"]
    written: Mapping[str, Any] = (data.get("quantization") or {}).get("loss") or found
    return written if not search["crossed"] or written["bound"] > found["bound"] else found


def search_text(data: Mapping[str, Any]) -> str:
    """Return the loss within which widths were searched, in words; empty if none were."""
    search, loss = (data.get("allocation") or {}).get("search"), loss_of(data)
    if not search or loss is None:
        return ""
    quantized: Mapping[str, Any] = data.get("quantization") or {}
    judged = (data.get("verification") or {}).get("judged") or {}
    how = seen(judged, crossed=search["crossed"])
    again = bool(quantized.get("loss") is loss)  # judged once more, as it is written
    if search["crossed"] and again:
        narrowed = any(block["kept"] < block["units"] for block in data["blocks"])
        how = "that fits have seen" if narrowed or quantized["kind"] not in WITHOUT_DATA else "that no fit has seen"
    return f"{loss_text(loss)} {how}; --max-loss {100 * search['limit']:g}%"


def seen(judged: Mapping[str, Any], *, crossed: bool) -> str:
    """Return in words if fits have seen the samples that judge the candidates of a search.

    Args:
        judged: the report entry on the samples that judge the result; it may be empty.
        crossed: True if every sample is judged by a fit without it.
    """
    if crossed:
        return "each judged by a fit without it"
    some = judged.get("seen") and judged["on"] == "held-out"
    return "of which fits have seen some" if some else "that no fit has seen"


def loss_text(loss: Mapping[str, Any]) -> str:
    """Return a measured loss with its bound in words."""
    of = f", output {loss['output']}" if loss["output"] else ""  # a metric judges all outputs
    bound = f"with 95 % confidence at most {loss['bound']:.2%}"
    bound = bound if math.isfinite(loss["bound"]) else "without a bound, as values are not finite"
    return f"{loss['mean']:.2%} ({loss_name(loss)}{of}), {bound}, on {loss['samples']} samples"


def loss_name(loss: Mapping[str, Any]) -> str:
    """Return what a loss is, with the factor that makes losses of all kinds mean as much."""
    scale = loss.get("scale", 1)  # not in reports of earlier versions
    return str(loss["name"]) if scale == 1 else f"{scale:g} x {loss['name']}"


def outcome_text(outcome: Mapping[str, Any]) -> str:
    """Return the outcome of a block in words, with the reason; empty if the status is ok."""
    if outcome["status"] == "ok":
        return ""
    words = OUTCOMES.get(outcome["status"], str(outcome["status"]))
    return words + (f": {outcome['reason']}" if outcome["reason"] else "")


def outcome_counts(blocks: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return the outcomes of blocks other than ok, with their counts, the most frequent first."""
    return tuple(Counter(text for block in blocks if (text := outcome_text(block["outcome"]))).most_common())


def refusal_counts(refusals: Iterable[Refusal | Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return the reasons of refusals with their counts, the most frequent first.

    Reasons that differ only in a measured number are one reason, with the largest number.
    """
    groups: dict[str, Counter[str]] = {}
    for refusal in refusals:
        reason = refusal.reason if isinstance(refusal, Refusal) else str(refusal["reason"])
        groups.setdefault(MEASURED.sub("", reason), Counter())[reason] += 1
    counts = ((_together(group), group.total()) for group in groups.values())
    return tuple(sorted(counts, key=lambda item: (-item[1], item[0])))


def _together(reasons: Collection[str]) -> str:
    """Return one text for reasons that differ only in a measured number."""
    most = max(reasons, key=lambda reason: [float(number) for number in MEASURED.findall(reason)])
    return most if len(reasons) == 1 else MEASURED.sub(r"up to \g<0>", most)


def nothing_text(refusals: Iterable[Refusal | Mapping[str, Any]]) -> str:
    """Return the message for a model of which nothing can be narrowed, with the most frequent reasons."""
    counts = refusal_counts(refusals)
    if not counts:
        return "nothing could be compressed: the model has no channels that one constant weight makes and another reads"
    return "nothing could be compressed: " + "; ".join(f"{reason} ({number}x)" for reason, number in counts[:3])
