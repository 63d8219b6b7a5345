"""The rows of the network: blocks and refusals in the order of their nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgrail.report.summary import KINDS, outcome_text

END = 2**62
ROLES = {"producer": "made by", "passenger": "carried by", "consumer": "read by"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRow:
    """A block: `kept` equals `units` if nothing was decided; errors are None if not measured.

    If the errors are already of held-out samples, `validation` is None.  `parts` are its nodes and its weights:
    words and names.
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
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def width(self) -> int:
        """Return the number of features at full width."""
        return self.units * self.unit_size

    @property
    def share(self) -> float:
        """Return the share of the units that stays."""
        return self.kept / self.units if self.units else 1.0

    @property
    def error(self) -> float | None:
        """Return the error after compensation, or before it if there was none."""
        return self.plain if self.compensated is None else self.compensated

    @property
    def kind_class(self) -> str:
        """Return the kind if the page has a color for it, else `other`."""
        return self.kind if self.kind in KINDS else "other"

    @property
    def kind_name(self) -> str:
        """Return the kind in words."""
        return KINDS[self.kind][0] if self.kind in KINDS else self.kind

    @property
    def noun(self) -> str:
        """Return the noun for its units."""
        return KINDS[self.kind][1] if self.kind in KINDS else "unit"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftRow:
    """Channels left alone for one reason at neighboring nodes."""

    reason: str
    nodes: tuple[str, ...]


Row = BlockRow | LeftRow


def rows_of(data: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return blocks and refusals of a report or an inspection in node order, those without a position at the end.

    Consecutive refusals for the same reason form one row.
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
    for reason, group in itertools.groupby(
        items, lambda item: None if isinstance(item[1], BlockRow) else str(item[1]["reason"])
    ):
        members = [item for _, item in group]
        if reason is None:
            rows += [item for item in members if isinstance(item, BlockRow)]
        else:
            rows.append(LeftRow(reason=reason, nodes=places(m for m in members if not isinstance(m, BlockRow))))
    return tuple(rows)


def places(refusals: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the nodes that prevent narrowing, each once; the value if the node is unknown."""
    named = (f"{r.get('op') or ''} {r.get('node') or ''}".strip() or str(r.get("value") or "") for r in refusals)
    return tuple(dict.fromkeys(named))


def blocks_of(rows: Sequence[Row]) -> list[BlockRow]:
    """Return only the blocks."""
    return [row for row in rows if isinstance(row, BlockRow)]


def kinds_of(blocks: Iterable[BlockRow]) -> dict[str, str]:
    """Return the mapping of color class to kind in words, for the kinds that occur."""
    return {block.kind_class: block.kind_name for block in blocks}


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
        parts=tuple(_parts(block)),
    )


def _parts(block: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the nodes of a block, and its weights by role; an inspection lists the weights by role already."""
    named: dict[str, list[object]] = {"nodes": list(block.get("nodes") or ())}
    named |= {words: [] for words in ROLES.values()}  # in this order
    for member in block.get("members") or ():
        named.setdefault(ROLES.get(member["role"], str(member["role"])), []).append(member["initializer"])
    for role, key in (("producer", "producers"), ("consumer", "consumers")):
        named[ROLES[role]] += block.get(key) or ()
    yield from ((words, tuple(dict.fromkeys(map(str, names)))) for words, names in named.items() if names)
