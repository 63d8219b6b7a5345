"""The network as the page shows it: blocks and what was left alone, in the order of their nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgrail.report.summary import outcome_text

KINDS = {
    "conv": ("convolution", "channel"),
    "mlp": ("MLP", "neuron"),
    "heads": ("attention", "head"),
    "stream": ("residual stream", "channel"),
}
END = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRow:
    """One block: `kept` equals `units` where nothing was decided; errors are None where nothing was measured.

    Errors that are of held-out samples already have no `validation`.
    """

    name: str
    kind: str
    units: int
    kept: int
    unit_size: int = 1
    plain: float | None = None
    compensated: float | None = None
    validation: float | None = None
    held_out: bool = False
    outcome: str = ""
    params: float | None = None
    macs: float | None = None

    @property
    def width(self) -> int:
        """Features at full width."""
        return self.units * self.unit_size

    @property
    def share(self) -> float:
        """Share of the units that stays."""
        return self.kept / self.units if self.units else 1.0

    @property
    def kind_class(self) -> str:
        """The kind where the page has a colour for it."""
        return self.kind if self.kind in KINDS else "other"

    @property
    def kind_name(self) -> str:
        """The kind in words."""
        return KINDS.get(self.kind, (self.kind, "unit"))[0]

    @property
    def noun(self) -> str:
        """What its units are."""
        return KINDS.get(self.kind, (self.kind, "unit"))[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftRow:
    """Channels left alone at one place of the network for one reason."""

    reason: str
    nodes: tuple[str, ...]


Row = BlockRow | LeftRow


def rows_of(data: Mapping[str, Any]) -> tuple[Row, ...]:
    """Blocks and refusals of a report or an inspection in node order, those without a position at the end.

    Refusals that follow each other for the same reason are one row.
    """
    items: list[tuple[tuple[int, int], BlockRow | Mapping[str, Any]]] = []
    for number, block in enumerate(data.get("blocks") or ()):
        first, last = block.get("span") or (number - END, END)
        items.append(((first, last), _block(block)))
    for refusal in data.get("refusals") or ():
        place = refusal.get("position")
        items.append(((END if place is None else place, -1), refusal))
    items.sort(key=lambda item: item[0])
    rows: list[Row] = []
    for reason, group in itertools.groupby(items, lambda item: _reason(item[1])):
        members = [item for _, item in group]
        if reason is None:
            rows += [item for item in members if isinstance(item, BlockRow)]
        else:
            rows.append(LeftRow(reason=reason, nodes=places(m for m in members if not isinstance(m, BlockRow))))
    return tuple(rows)


def places(refusals: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The nodes that stand in the way, each once; the value where no node is known."""
    named = (f"{r.get('op') or ''} {r.get('node') or ''}".strip() or str(r.get("value") or "") for r in refusals)
    return tuple(dict.fromkeys(named))


def blocks_of(rows: Sequence[Row]) -> list[BlockRow]:
    """Only the blocks."""
    return [row for row in rows if isinstance(row, BlockRow)]


def kinds_of(blocks: Iterable[BlockRow]) -> dict[str, str]:
    """Colour class -> kind in words, of the blocks that there are."""
    return {block.kind_class: block.kind_name for block in blocks}


def _reason(item: BlockRow | Mapping[str, Any]) -> str | None:
    return None if isinstance(item, BlockRow) else str(item["reason"])


def _block(block: Mapping[str, Any]) -> BlockRow:
    error, outcome = block.get("error") or {}, block.get("outcome") or {}
    units = int(block["units"])
    validation = error.get("validation")
    held_out = validation is not None and validation == error.get("compensated")
    return BlockRow(
        name=str(block.get("name") or block["kind"]),
        kind=str(block["kind"]),
        units=units,
        kept=int(block.get("kept", units)),
        unit_size=int(block.get("unit_size") or 1),
        plain=error.get("plain"),
        compensated=error.get("compensated"),
        validation=None if held_out else validation,
        held_out=held_out,
        outcome=outcome_text({"status": "ok", "reason": "", **outcome}),
        params=block.get("params"),
        macs=block.get("macs"),
    )
