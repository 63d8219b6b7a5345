"""A search runs the original model once: trials and fits of candidates read what it computes from memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.method import reduce_and_compensate
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.calibration.judge import Judge, Outputs
from onnxgrail.calibration.metric import Metric
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.runtime.session import Session
from onnxgrail.calibration.stream.ways import Ways
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.core import Array, Block, View
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.bits.rounding import rounded
from onnxgrail.narrowing.bits.sides import Guide
from onnxgrail.narrowing.bits.store import Entry
from onnxgrail.narrowing.choosing import Run
from onnxgrail.narrowing.grail import settle
from onnxgrail.narrowing.two_networks import Targets, goals_of
from onnxgrail.options import Recipe
from onnxgrail.search.begun import recorded
from tests.tiny import tiny, two_mlps

DATA = {"x": np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)}
RECIPE = Recipe(compensate="best", selector="l2")
FEW = Recipe(quantize="int4", block_size=16)
CONV = """
    a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, c1)
    b = Relu(a)
    c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(b, c2)
    d = Relu(c)
    e = Conv<kernel_shape=[1,1]>(d, c3)
    f = GlobalAveragePool(e)
    y = Flatten(f)
"""
LABELS = """
    a = MatMul(x, w1)
    b = Relu(a)
    c = MatMul(b, w2)
    d = Relu(c)
    s = MatMul(d, w3)
    y = ArgMax<axis=1, keepdims=0>(s)
"""


EARLY = """
    k = MatMul(x, w1)
    present = Concat<axis=0>(past, k)
    fixed = Mul(two, two)
    copied = Identity(past)
    g = Relu(k)
    a = MatMul(g, w2)
    b = Relu(a)
    c = MatMul(b, w3)
    d = Relu(c)
    y = MatMul(d, w4)
    parts = SequenceConstruct(y, k)
"""


def of_mlps() -> Prepared:
    return prepare(two_mlps(12, 48, 32), DATA, Job(recipe=RECIPE), held_out=0)


def of_convolutions() -> Prepared:
    sizes = {"c1": (12, 3, 3, 3), "c2": (16, 12, 3, 3), "c3": (5, 16, 1, 1)}
    images = np.random.default_rng(1).standard_normal((48, 3, 6, 6)).astype(np.float32)
    return prepare(tiny("float[N,3,6,6] x => float[N,5] y", CONV, sizes), {"x": images}, Job(recipe=RECIPE), held_out=0)


def of_labels() -> Prepared:
    sizes = {"w1": (12, 24), "w2": (24, 16), "w3": (16, 4)}
    return prepare(tiny("float[N,12] x => int64[N] y", LABELS, sizes), DATA, Job(recipe=RECIPE), held_out=0)


def of_matrices() -> Prepared:
    sizes, data = {"w1": (64, 96), "w2": (96, 64), "w3": (64, 32)}, np.random.default_rng(0).standard_normal((64, 64))
    body = "a = MatMul(x, w1)  b = Relu(a)  c = MatMul(b, w2)  d = Relu(c)  y = MatMul(d, w3)"
    model = tiny("float[N,64] x => float[N,32] y", body, sizes, opset=21)
    return prepare(model, {"x": data.astype(np.float32)}, Job(recipe=RECIPE), held_out=0)


def of_early_outputs() -> Prepared:
    sizes = {"w1": (12, 16), "w2": (16, 24), "w3": (24, 20), "w4": (20, 4), "two": (2,)}
    outputs = "float[P,16] present, float[2] fixed, float[M,16] copied, seq(float) parts, float[N,4] y"
    data = DATA | {"past": np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)}
    return prepare(
        tiny(f"float[N,12] x, float[M,16] past => {outputs}", EARLY, sizes), data, Job(recipe=RECIPE), held_out=0
    )


def halved(prepared: Prepared, block: Block) -> Ledger:
    """The ledger with half of a block's units gone."""
    nothing = weights.empty(prepared.survey)
    view = View(block=block, weights=weights.read(block, prepared.model, prepared.survey, nothing), stats=())
    change = reduce_and_compensate(
        view,
        block.units // 2,
        selector=SELECTORS["l2"],
        reducer=REDUCERS["prune"],
        compensator=COMPENSATORS["none"],
        rng=np.random.default_rng(0),
    )
    return weights.record(change, prepared.model, prepared.survey, nothing)


@pytest.mark.parametrize("make", [of_mlps, of_convolutions, of_labels, of_early_outputs])
def test_trials_from_the_block_on_lose_what_the_whole_model_loses(make: Callable[[], Prepared]) -> None:
    prepared = make()
    nothing, every = weights.empty(prepared.survey), range(len(prepared.batches))
    blocks = sorted(prepared.survey.blocks, key=lambda block: block.span[0])
    with Judge(prepared.model, prepared.batches, RECIPE.providers) as judge, stream_of(prepared, RECIPE) as stream:
        for block in blocks:
            ledger = halved(prepared, block)
            stream.advance(nothing, block.span[0])
            tail = judge.loss_of([nullcontext(recorded(prepared, judge, stream, ledger, every))], every)
            whole = judge.loss((narrowed(prepared, ledger), every))
            assert tail.kind == whole.kind
            assert whole.mean > 0
            np.testing.assert_allclose(tail.values, whole.values, rtol=1e-3, atol=1e-6)
        assert len(blocks) > 1
        assert stream.position > 0  # the nodes before the last block were not run again


def kept_of(prepared: Prepared, most: int) -> Sequence[Mapping[str, Array]]:
    return Targets(RECIPE, most, [prepared.model]).of(prepared, goals_of(prepared, RECIPE, prepared.survey.blocks))


def fitted(prepared: Prepared, known: Sequence[Mapping[str, Array]]) -> tuple[Ledger, Run]:
    blocks = prepared.survey.blocks
    run = Run(prepared, Job(recipe=RECIPE), {block.name: block.units // 2 for block in blocks}, None, known)
    settle(run, blocks)
    return run.ledger, run


@pytest.mark.parametrize("make", [of_mlps, of_convolutions])
def test_fits_to_kept_targets_are_those_to_computed_ones(make: Callable[[], Prepared]) -> None:
    prepared = make()
    kept = kept_of(prepared, 2**30)
    assert len(kept) == len(prepared.batches)
    (one, run), (two, _) = (fitted(prepared, known) for known in ((), kept))
    assert run.refits
    assert one.arrays.keys() == two.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_allclose(two.arrays[name], array, rtol=1e-3, atol=1e-4)


def test_kept_targets_are_what_layers_are_fitted_to() -> None:
    prepared = of_convolutions()
    kept = kept_of(prepared, 2**30)
    doubled = [{name: 2 * array for name, array in found.items()} for found in kept]
    _, run = fitted(prepared, doubled)
    errors = [(one.before, one.after) for one in run.refits]
    assert errors
    for before, after in errors:
        assert before is not None
        assert after is not None
        assert after < before
        assert before > 0.2  # what the network computes is half of every target


def test_targets_that_are_too_large_are_not_kept() -> None:
    prepared = of_mlps()
    assert not any(kept_of(prepared, 1000))


def test_matrices_are_rounded_to_kept_targets_as_to_computed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = of_matrices()
    targets = Targets(RECIPE, 2**30, [prepared.model])
    ledger = halved(prepared, prepared.survey.blocks[0])
    slim = narrowed(prepared, ledger)
    ran: list[str] = []
    opened = Ways.open
    monkeypatch.setattr(Ways, "open", lambda ways, names, *rest: ran.extend(names) or opened(ways, names, *rest))

    def entries(kept: Targets | None) -> tuple[tuple[Entry, ...], int]:
        ran.clear()
        guide = Guide.of(prepared, ledger, RECIPE, kept)
        return rounded(guide, slim, Job(recipe=FEW)).entries, len(ran)

    (one, computed), (two, _), (three, known) = (entries(kept) for kept in (None, targets, targets))
    assert two == three
    assert known < computed  # the dense network is not run again
    assert [(e.weight, e.rounding) for e in two] == [(e.weight, e.rounding) for e in one]
    assert any(e.rounding == "carried" for e in two)
    for found, wanted in zip(two, one, strict=True):
        np.testing.assert_allclose(found.after, wanted.after, rtol=1e-3)


def test_rounding_aims_at_kept_targets() -> None:
    prepared = of_matrices()
    targets, untouched = Targets(RECIPE, 2**30, [prepared.model]), weights.empty(prepared.survey)

    def error() -> float:
        """Of the first matrix, rounded to nearest."""
        made = rounded(Guide.of(prepared, untouched, RECIPE, targets), prepared.model, Job(recipe=FEW))
        return made.entries[0].before or 0.0

    assert 0 < error() < 0.01
    for found in targets.of(prepared, ()):
        for name in found:
            found[name] = 2 * found[name]  # type: ignore[index]
    assert error() > 0.2  # what the network computes is half of every target


def test_judges_share_the_outputs_of_the_original_model(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, shared = of_labels(), Outputs()
    ledger = halved(prepared, prepared.survey.blocks[0])
    slim, every = narrowed(prepared, ledger), range(len(prepared.batches))
    ran: list[bool] = []
    run = Session.run
    monkeypatch.setattr(Session, "run", lambda self, feed: ran.append(True) or run(self, feed))

    def loss(metric: Metric | None = None, outputs: Outputs | None = None) -> tuple[bytes, int]:
        ran.clear()
        with Judge(prepared.model, prepared.batches, RECIPE.providers, metric, outputs=outputs) as judge:
            found = judge.loss((slim, every))
        return found.values.tobytes(), len(ran)

    alone = loss()
    assert loss(None, shared) == alone == (alone[0], 2 * len(every))
    assert loss(None, shared) == (alone[0], len(every))
    ours = Metric(name="own", function=lambda one, two, _: np.asarray(one["y"] != two["y"], np.float64))
    assert loss(ours, shared) == loss(ours)  # labels are no scores: they are computed on their own
