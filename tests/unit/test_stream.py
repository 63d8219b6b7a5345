"""The stream: what is measured once is not computed again, and everything is as a run of the whole network has it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrail.algebra.moments.gram import Sums
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime import threads
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.calibration.stream import stream as module
from onnxgrail.calibration.stream import ways
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Stats
from onnxgrail.graph.cuts.live import Lives
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.group.sums import SOLO, Node
from onnxgrail.machine.steps.codec import Record
from onnxgrail.narrowing.order import closed_steps
from tests.oracle import prepared_of, run
from tests.tiny import cnn, feed, mlp

MODELS = {"mlp": lambda: mlp(4), "cnn": lambda: cnn((8, 6, 6))}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often a session of the stream computed each tensor."""
    found: Counter[str] = Counter()
    original = ways.open_piece

    def counted(source: Any, *options: Any) -> Any:
        proto = ir.from_proto(onnx.ModelProto.FromString(source.data))
        found.update(v.name or "" for node in proto.graph for v in node.outputs)
        return original(source, *options)

    monkeypatch.setattr(ways, "open_piece", counted)
    return found


def surveyed(name: str) -> tuple[ir.Model, Survey, list[dict[str, Any]]]:
    model = MODELS[name]()
    survey = trace(model, observe(model, feed(model)))
    inner = tuple(block for block in survey.blocks if block.kind != "stream")
    assert len(inner) >= 2
    survey = dataclasses.replace(survey, blocks=inner)
    return model, survey, [feed(model, seed=seed) for seed in range(1, 7)]


def opened(model: ir.Model, survey: Survey, feeds: list[dict[str, Any]]) -> Stream:
    makers = tuple(lambda one=one: one for one in feeds)  # type: ignore[misc]
    batches = Batches(feeds=makers, samples=len(feeds), source="test")
    return Stream(prepared_of(model, survey, batches), providers=CPU)


def half(survey: Survey, number: int, ledger: Ledger) -> Ledger:
    """The ledger without every second unit of a block."""
    dead = ledger.dead.copy()
    dead[survey.blocks[number].ids[::2]] = True
    return dataclasses.replace(ledger, dead=dead)


def naive(model: ir.Model, survey: Survey, ledger: Ledger, feeds: list[dict[str, Any]], number: int) -> Stats:
    """Second moments from runs of the whole narrowed network."""
    slim = model.clone()
    apply(slim.graph, survey, ledger)
    (probe,) = survey.blocks[number].probes
    rows = []
    for one in feeds:
        array = run(to_bytes(slim, [probe.value]), one)[probe.value]
        rows.append(np.moveaxis(array, probe.axis, -1).reshape(-1, array.shape[probe.axis]).astype(np.float64))
    flat = np.concatenate(rows)
    if probe.pooled:
        flat = np.moveaxis(flat[:, probe.index], 1, -1).reshape(-1, probe.width)
    return Stats(gram=flat.T @ flat, total=flat.sum(axis=0), count=len(flat))


@every_model
@pytest.mark.parametrize("kept", [0, 2**28], ids=["nothing kept", "kept"])
def test_every_step_sees_the_network_as_decided_so_far(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", kept)
    model, survey, feeds = surveyed(name)
    ledger = weights.empty(survey)
    with opened(model, survey, feeds) as stream:
        for number, step in enumerate(closed_steps(survey.blocks)):
            (block,) = step.blocks
            (got,) = stream.measure(block.probes, ledger, lambda: None, step.limit)
            want = naive(model, survey, ledger, feeds, number)
            assert got.count == want.count
            np.testing.assert_allclose(got.gram, want.gram, rtol=0, atol=1e-4 * np.abs(want.gram).max())
            ledger = half(survey, number, ledger)


@every_model
def test_a_measured_tensor_is_not_computed_again(name: str, ran: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lives, "best", lambda self, low, high: high)  # as far as it goes, however much that keeps
    model, survey, feeds = surveyed(name)
    ledger = weights.empty(survey)
    with opened(model, survey, feeds) as stream:
        for number, step in enumerate(closed_steps(survey.blocks)):
            stream.measure(step.blocks[0].probes, ledger, lambda: None, step.limit)
            ledger = half(survey, number, ledger)
    measured = {probe.value for block in survey.blocks for probe in block.probes}
    assert len(measured) == len(survey.blocks)
    assert {ran[value] for value in measured} == {1}


def test_a_measured_tensor_is_computed_again_behind_new_weights(ran: Counter[str]) -> None:
    model, survey, feeds = surveyed("mlp")
    block = survey.blocks[1]
    (probe,) = block.probes
    empty = weights.empty(survey)
    producer = block.producers[0]
    twice = 2 * weights.original(producer.initializer, model, survey)
    doubled = dataclasses.replace(empty, arrays={producer.param: twice})
    with opened(model, survey, feeds) as stream:
        (before,) = stream.measure([probe], empty, lambda: None, 0)
        (after,) = stream.measure([probe], doubled, lambda: None, 0)
        (again,) = stream.measure([probe], doubled, lambda: None, 0)
    assert ran[probe.value] == 2
    assert np.array_equal(after.gram, again.gram)
    want = naive(model, survey, doubled, feeds, 1)
    np.testing.assert_allclose(after.gram, want.gram, rtol=0, atol=1e-4 * np.abs(want.gram).max())
    assert np.abs(after.gram - before.gram).max() > 0.1 * np.abs(before.gram).max()


def test_equal_probes_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, survey, feeds = surveyed("mlp")
    (probe,) = survey.blocks[0].probes
    added = []
    original = Sums.add
    monkeypatch.setattr(Sums, "add", lambda self, x, *rest: (added.append(1), original(self, x, *rest)))
    with opened(model, survey, feeds) as stream:
        first, second = stream.measure([probe, dataclasses.replace(probe)], weights.empty(survey), lambda: None)
    assert len(added) == len(feeds)
    assert first is second


def test_recording_leaves_the_stream_as_it_was() -> None:
    model, survey, feeds = surveyed("mlp")
    ledger = weights.empty(survey)
    (probe,) = survey.blocks[0].probes
    with opened(model, survey, feeds) as stream:
        (want,) = stream.measure([probe], ledger, lambda: None, 0)
        next(iter(stream.record(["y"], half(survey, 0, ledger))))  # looked at and left, as zip does
        got = [found["y"] for found in stream.record(["y"], ledger)]
        (still,) = stream.measure([probe], ledger, lambda: None, 0)
    for array, one in zip(got, feeds, strict=True):
        np.testing.assert_allclose(array, run(model, one)["y"], atol=1e-5)
    assert np.array_equal(want.gram, still.gram)


class _Part:
    """One of several processes, as far as a stream sees it; its sums stay where they are."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def collect(self, nodes: list[Node], owners: Sequence[int]) -> None:
        """Nothing travels."""

    def exchange(self, arrays: Sequence[np.ndarray], *_: object) -> list[Sequence[np.ndarray]]:
        return [arrays]

    def share(self, record: Record | None, _: int = 0) -> Record | None:
        """Nothing travels."""
        return record

    def agree(self, _: str) -> bool:
        return True


@pytest.mark.parametrize("kept", [0, 3000, 2**28], ids=["nothing kept", "something kept", "kept"])
def test_all_processes_keep_the_same(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept tensors decide from where the next ones are computed, and so their last bits."""
    monkeypatch.setattr(module, "KEPT", kept)
    model, survey, feeds = surveyed("cnn")
    makers = tuple(lambda one=one: one for one in feeds)  # type: ignore[misc]
    batches = Batches(feeds=makers, samples=len(feeds), source="test")
    names: list[list[list[str]]] = []
    for group in (SOLO, *map(_Part, range(3))):
        ledger = weights.empty(survey)
        with Stream(prepared_of(model, survey, batches), providers=CPU, group=group) as stream:
            names.append([])
            for number, step in enumerate(closed_steps(survey.blocks)):
                stream.measure(step.blocks[0].probes, ledger, lambda: None, step.limit)
                names[-1].append(sorted(stream._cache.names))
                ledger = half(survey, number, ledger)
    assert all(found == names[0] for found in names)
    assert kept == 0 or any(probe.value in found for found in names[0] for b in survey.blocks for probe in b.probes)


@every_model
def test_steps_that_are_known_are_walked_past_as_they_were_measured(name: str) -> None:
    model, survey, feeds = surveyed(name)
    *known, last = closed_steps(survey.blocks)
    found = []
    for replay in (False, True):
        ledger = weights.empty(survey)
        with opened(model, survey, feeds) as stream:
            for number, step in enumerate(known):
                if replay:
                    stream.skip(step.blocks[0].probes, ledger, lambda: None, step.limit)
                else:
                    stream.measure(step.blocks[0].probes, ledger, lambda: None, step.limit)
                ledger = half(survey, number, ledger)
            (stats,) = stream.measure(last.blocks[0].probes, ledger, lambda: None, last.limit)
            found.append((stream._cache.names, stats.gram.tobytes()))
    assert found[0] == found[1]


@every_model
@pytest.mark.parametrize("kept", [0, 2**28], ids=["too large", "kept"])
def test_goals_wait_in_the_cache(name: str, kept: int, ran: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the run that measures; where they would be too large, from another one."""
    monkeypatch.setattr(module, "KEPT", kept)
    model, survey, feeds = surveyed(name)
    ledger = weights.empty(survey)
    for block in survey.blocks:
        with opened(model, survey, feeds) as stream:
            (probe, *_), goals = block.probes, [model.graph.node(block.span[0]).outputs[0].name or ""]
            assert goals != [probe.value]
            ran.clear()
            (got,) = stream.measure(block.probes, ledger, lambda: None, block.span[1], goals)
            assert stream.holds(goals) == bool(kept)
            assert (stream.position > 0) == bool(kept)
            limit = 0 if stream.holds(goals) else block.span[1]
            with stream.following(goals, ledger, limit, 2) as step:
                found = [step(place) for place in reversed(range(len(feeds)))][::-1]
            assert ran[goals[0]] == (1 if kept else 2)
            stream.let_go()
            assert not stream.holds(goals)
            for one, fed in zip(found, feeds, strict=True):
                np.testing.assert_allclose(one[goals[0]], run(to_bytes(model, goals), fed)[goals[0]], atol=1e-5)
            want = naive(model, survey, ledger, feeds, survey.blocks.index(block))
            np.testing.assert_allclose(got.gram, want.gram, rtol=0, atol=1e-4 * np.abs(want.gram).max())


@pytest.mark.parametrize("room", [0, 2**28], ids=["one after the other", "side by side"])
def test_parts_of_the_batches_give_the_same_bits(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread for each, the stream after them too."""
    monkeypatch.setattr(threads, "ROOM", room)
    model, survey, _ = surveyed("mlp")
    feeds = [feed(model, seed=seed) for seed in range(9)]
    ticks: list[None] = []

    def measured(count: int) -> tuple[object, ...]:
        for place in (threads, ways):
            monkeypatch.setattr(place, "count", lambda: count)
        ticks.clear()
        with opened(model, survey, feeds) as stream:
            assert stream.ways(1) == (3 if count == 3 and room else 1)
            first, last = survey.blocks[0], survey.blocks[-1]
            ledger = weights.empty(survey)
            (stats,) = stream.measure(first.probes, ledger, lambda: ticks.append(None), first.span[1])
            (after,) = stream.measure(last.probes, half(survey, 0, ledger), lambda: ticks.append(None))
            assert len(ticks) == 2 * len(feeds)
            return stats.gram.tobytes(), stats.count, after.gram.tobytes(), stream.position

    assert measured(1) == measured(3)
