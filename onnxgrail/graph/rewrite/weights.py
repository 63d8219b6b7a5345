"""Read the working values of a block's weights, and record decisions in the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Block, Bools, Change, Floats, Ints, Slot
from onnxgrail.errors import ModelError
from onnxgrail.graph import slots
from onnxgrail.graph.io.mapped import Mapped
from onnxgrail.graph.io.shelves import shelved
from onnxgrail.graph.stored.integers import Levels, Load
from onnxgrail.graph.trace.facts import Facts, constant_of
from onnxgrail.graph.trace.survey import Ledger, Survey

HELD = 2**30  # most bytes of the converted weights of a block that stay in memory; a stream has all of a network


def empty(survey: Survey) -> Ledger:
    """Return a ledger without decisions."""
    return Ledger(dead=np.zeros(survey.ids, dtype=bool), arrays={})


class Channels(Sequence[Floats]):
    """One (u, m, r) array per slot of a block, converted to float64 when it is used."""

    def __init__(self, block: Block, load: Callable[[int], Array], *, held: bool) -> None:
        """Convert what `load` returns for a slot; `held` if the converted weights stay in memory."""
        self._block, self._load, self._held = block, load, held
        self._read: dict[int, Floats] = {}

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._block.slots)

    def __getitem__(self, number: int) -> Floats:  # type: ignore[override]  # nobody takes slices
        """Return the array of a slot."""
        if number in self._read:
            return self._read[number]
        found = slots.read(self._load(number), self._block.slots[number])
        if self._held:
            self._read[number] = found
        return found


def read(block: Block, model: ir.Model, survey: Survey, ledger: Ledger) -> Channels:
    """Return the channels of a block's slots, zero at positions that other blocks have removed.

    Raises:
        ModelError: a weight holds NaN or infinity.
    """
    axes, shapes = {operand.param: operand.units for operand in survey.operands.values()}, survey.facts.shapes
    held = sum(8 * math.prod(shapes[slot.initializer]) for slot in block.slots)
    found: dict[int, Array] = {}

    def load(number: int) -> Array:
        slot = block.slots[number]
        if number in found:
            return found[number]
        return _alive(_array(slot, model, survey, ledger), axes.get(slot.param, {}), ledger.dead)

    for number, slot in enumerate(block.slots):
        array = load(number)
        if not np.isfinite(array).all():
            raise ModelError(
                f"the weight {slot.initializer} of block {block.name} holds NaN or infinity",
                hint=f"Leave it out with --exclude '{block.name}' or repair the model",
            )
        if held <= HELD:
            found[number] = array
    return Channels(block, load, held=held <= HELD)


def record(change: Change, model: ir.Model, survey: Survey, ledger: Ledger) -> Ledger:
    """Return the ledger with one more decision."""
    block = change.block
    dead = ledger.dead.copy()
    dead[np.delete(block.ids, change.reducer.kept)] = True
    arrays = dict(ledger.arrays)
    now = Ledger(dead=ledger.dead, arrays=arrays)
    for number, values in change.weights:
        slot = block.slots[number]
        array = slots.write(_array(slot, model, survey, now), slot, change.reducer.kept, values)
        arrays[slot.param] = put(array, model.graph.initializers.get(slot.initializer))
    return Ledger(dead=dead, arrays=arrays, shifts=ledger.shifts)


def put(array: Array, old: ir.Value | None) -> Array:
    """Return new values, moved to a file if the old ones are in a file.

    Otherwise the ledger of a deep model would fill the memory.
    """
    if old is None or not isinstance(old.const_value, Mapped):
        return array
    return shelved(array)


def original(name: str, model: ir.Model, survey: Survey) -> Array:
    """Return a weight of the model, dequantized if it is quantized."""
    load, stored = loading(model.graph.initializers, survey.facts), survey.facts.stored.get(name)
    return load(name) if stored is None else stored.decode(load)


def levels(name: str, values: Array, model: ir.Model, survey: Survey) -> Levels:
    """Return the numbers that a quantized weight can have if its scales grow for new values."""
    load, stored = loading(model.graph.initializers, survey.facts), survey.facts.stored[name]
    return stored.levels(load, stored.cut(load, {}, values))


def loading(held: Mapping[str, ir.Value], facts: Facts) -> Load:
    """Return what loads the parts of a quantized weight from these initializers."""

    def load(part: str) -> Array:
        array = constant_of(held.get(part), part, facts)
        assert array is not None, part
        return array

    return load


def _array(slot: Slot, model: ir.Model, survey: Survey, ledger: Ledger) -> Array:
    found = ledger.arrays.get(slot.param)
    return original(slot.initializer, model, survey) if found is None else found


def _alive(array: Array, units: Mapping[int, Ints], dead: Bools) -> Array:
    for axis, numbers in units.items():
        gone = dead[numbers]
        if gone.any():
            array = array.copy()
            np.moveaxis(array, axis, 0)[gone] = 0
    return array
