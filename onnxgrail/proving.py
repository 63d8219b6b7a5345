"""The proof that blocks narrow exactly, as a step of a run: the first of several processes does it for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from onnxgrail.calibration.proof import prove
from onnxgrail.core import Block, Bools, Recipe, Refusal
from onnxgrail.once import Once
from onnxgrail.parallel import Group
from onnxgrail.preparation import Prepared
from onnxgrail.record import Record


def proved(
    prepared: Prepared,
    recipe: Recipe,
    blocks: Sequence[Block],
    widths: Mapping[str, int],
    group: Group,
    dead: Bools | None = None,
) -> tuple[tuple[Block, ...], tuple[Refusal, ...]]:
    """Blocks that narrow exactly, and refusals for the others; `dead` are the units that go, where that is known."""

    def proof() -> Record:
        good, refusals = prove(
            prepared.model,
            prepared.survey,
            blocks,
            widths,
            prepared.feed,
            providers=recipe.providers,
            folder=prepared.folder,
            dead=dead,
        )
        return Record(notes={"good": [b.name for b in good], "refusals": [dataclasses.asdict(r) for r in refusals]})

    found = Once(group=group).shared(proof).notes
    return tuple(b for b in blocks if b.name in found["good"]), tuple(Refusal(**r) for r in found["refusals"])


def rounds(prepared: Prepared) -> bool:
    """Whether activations are rounded to integers on the way, so that the last digit of a sum can tip over a step."""
    constants = prepared.survey.facts.constants
    return any(
        node.op_type == "QuantizeLinear" and (node.outputs[0].name or "") not in constants
        for node in prepared.model.graph
    )
