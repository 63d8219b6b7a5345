"""Fits add biases only if narrower blocks save more bytes than these take."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.layers import as_decided, stages_at
from onnxgrail.options import Recipe
from tests.tiny import tiny

RECIPE = Recipe(compensate="best", max_loss=0.1)
DEPTH, WIDTH = 6, 32
SIZES = {f"c{n}": (WIDTH, WIDTH, 1, 1) for n in range(DEPTH + 1)}


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """A chain of convolutions without biases."""
    lines = [f"a{n} = Conv(r{n - 1}, c{n})\nr{n} = Relu(a{n})" for n in range(1, DEPTH)]
    text = "\n".join(["a0 = Conv(x, c0)", "r0 = Relu(a0)", *lines, f"y = Conv(r{DEPTH - 1}, c{DEPTH})"])
    images = np.random.default_rng(0).standard_normal((8, WIDTH, 2, 2)).astype(np.float32)
    model = tiny(f"float[N,{WIDTH},2,2] x => float[N,{WIDTH},2,2] y", text, SIZES)
    return prepare(model, {"x": images}, Job(recipe=RECIPE), held_out=0)


def new(prepared: Prepared, recipe: Recipe, widths: Mapping[str, int]) -> int:
    """The number of layers that get a bias."""
    stages = stages_at(prepared, recipe, widths)
    ledger = weights.empty(prepared.survey)
    for block in prepared.survey.blocks:
        ledger.dead[block.ids[widths[block.name] :]] = True
    again = [as_decided(stage, prepared, recipe, ledger) for stage in stages]
    assert [[t.fresh for t in s.tasks] for s in again] == [[t.fresh for t in s.tasks] for s in stages]
    return sum(task.fresh for stage in stages for task in stage.tasks)


def test_a_unit_does_not_pay_for_biases_everywhere(prepared: Prepared) -> None:
    first, *others = sorted(prepared.survey.blocks, key=lambda block: block.span[0])
    whole = {block.name: block.units for block in others}
    assert new(prepared, RECIPE, {**whole, first.name: first.units - 1}) == 0
    assert new(prepared, RECIPE, {**whole, first.name: first.units // 4}) > 1


def test_fewer_bits_pay_for_them(prepared: Prepared) -> None:
    first, *others = sorted(prepared.survey.blocks, key=lambda block: block.span[0])
    widths = {block.name: block.units for block in others} | {first.name: first.units - 1}
    assert new(prepared, Recipe(compensate="best", max_loss=0.1, minimize="size"), widths) > 1
