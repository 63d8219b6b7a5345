"""The report's entry for a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from onnxgrail.core import Block, BlockError, Change, Ints, Outcome, Slot
from onnxgrail.graph.stored.integers import Stored

AxisSizes = Mapping[str, tuple[int, ...]]


def block_entry(
    block: Block,
    change: Change | None,
    axis_sizes: AxisSizes,
    stored: Mapping[str, Stored] | None = None,
    *,
    nodes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the report's entry for a block.

    Args:
        block: the block.
        change: the decision; None if the block was not selected.
        axis_sizes: original shape of every weight that a slot names.
        stored: the weights among them that the file stores as integers with scales.
        nodes: names of the nodes that read its weights.

    Returns:
        The entry. `kept` counts units; `kept_units` lists them; `selector` is empty if no scores were needed. A
        member's `kept` lists the positions of the whole original axis that this block does not drop, including those
        that belong to other blocks or to none.
    """
    outcome = asdict(Outcome(status="skipped", reason="not selected") if change is None else change.outcome)
    narrowed = change is not None and change.outcome.status != "skipped"
    kept = change.reducer.kept if change is not None and narrowed else np.arange(block.units)
    cluster = change.reducer.cluster if change is not None and narrowed else None
    gone = np.setdiff1d(np.arange(block.units), kept)
    return {
        "name": block.name,
        "kind": block.kind,
        "units": block.units,
        "unit_size": block.unit_size,
        "span": list(block.span),
        "kept": len(kept),
        "kept_units": kept.tolist(),
        "selector": change.selector if change is not None and narrowed else "",
        "exact": True,  # narrowing it equals zeroing its consumers' dropped positions
        "nodes": list(nodes),
        "members": _members(block, gone, cluster, axis_sizes, stored or {}),
        "error": asdict(BlockError() if change is None else change.error),
        "outcome": outcome,
    }


def _members(
    block: Block, gone: Any, cluster: Any, axis_sizes: AxisSizes, quantised: Mapping[str, Stored]
) -> list[dict[str, Any]]:
    """Return an entry per slot; a weight stored as integers with scales is named by the arrays in the file."""
    found: list[dict[str, Any]] = []
    for slot in block.slots:
        common = {"cluster": None if cluster is None else cluster.tolist()}
        kept = _kept_positions(block.slots, slot, gone, axis_sizes)
        stored = quantised.get(slot.initializer)
        parts = [(slot.initializer, slot.axis, kept)] if stored is None else stored.members(slot.axis, kept)
        for number, (name, axis, positions) in enumerate(parts):
            role = slot.role if number == 0 else "passenger"
            found.append({"initializer": name, "axis": axis, "role": role, "kept": positions.tolist(), **common})
    return found


def _kept_positions(slots: Sequence[Slot], slot: Slot, gone: Any, axis_sizes: AxisSizes) -> Ints:
    """Return the positions along the slot's axis that no slot of the block drops."""
    keep = np.ones(axis_sizes[slot.initializer][slot.axis], dtype=bool)
    for other in slots:
        if (other.param, other.axis) == (slot.param, slot.axis):
            keep[other.index[gone]] = False
    return np.flatnonzero(keep)
