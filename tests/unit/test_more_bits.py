"""A model that loses too much in the bits of a search gets more of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.core import Refusal
from onnxgrail.finishing.more_bits import holding
from onnxgrail.narrowing.bits.rounding import Bits
from onnxgrail.narrowing.bits.store import Entry
from tests.tiny import tiny

SLIM = tiny("float[N,8] x => float[N,4] y", "a = MatMul(x, w0)\nb = MatMul(a, w1)\ny = MatMul(b, w2)", {
    "w0": (8, 64), "w1": (64, 16), "w2": np.ones((16, 4), np.float32)})  # fmt: skip
CHOSEN = {"w0": 4, "w1": 4, "w2": 8}


def bits_of(bits: Mapping[str, int]) -> Bits:
    few_bits = {name: few for name, few in bits.items() if few < 32}
    entries = [Entry(weight=n, nodes=(), bits=few, block_size=32, rounding="carried") for n, few in few_bits.items()]
    left = tuple(Refusal(value=name, node="", op="", reason="", position=0) for name, few in bits.items() if few == 32)
    return Bits(model=ir.Model(SLIM.graph, ir_version=10), entries=tuple(entries), left=left)


@pytest.mark.parametrize(
    ("needed", "found"),
    [
        ({}, CHOSEN),
        ({"w0": 8}, {"w0": 8, "w1": 4, "w2": 8}),  # the smaller one first
        ({"w1": 8}, {"w0": 8, "w1": 8, "w2": 8}),
        ({"w2": 16}, {"w0": 8, "w1": 8, "w2": 16}),
        ({"w1": 16}, {"w0": 16, "w1": 16, "w2": 16}),
        ({"w1": 17}, CHOSEN),  # nothing helps
    ],
    ids=str,
)
def test_the_smallest_weights_get_more_bits_first(needed: dict[str, int], found: dict[str, int]) -> None:
    given: dict[int, Mapping[str, int]] = {}

    def again(bits: Mapping[str, int]) -> Bits:
        made = bits_of(bits)
        given[id(made.model)] = bits
        kept.append(made)
        return made

    kept = [bits_of(CHOSEN)]
    given[id(kept[0].model)] = CHOSEN

    def holds(model: ir.Model) -> bool:
        return all(given[id(model)][name] >= few for name, few in needed.items())

    made = holding(kept[0], SLIM, again, holds)
    assert dict(given[id(made.model)]) == found


def test_weights_that_keep_their_numbers_keep_them() -> None:
    seen: list[Mapping[str, int]] = []

    def again(bits: Mapping[str, int]) -> Bits:
        seen.append(bits)
        return bits_of(bits)

    holding(bits_of({"w0": 4, "w1": 32}), SLIM, again, lambda _: False)
    assert {bits["w1"] for bits in seen} == {32}
