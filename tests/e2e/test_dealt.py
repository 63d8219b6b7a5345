"""The work of a job dealt out to processes: any number of them writes the bytes of one.

Processes are threads here, so that many cases take little time; `test_processes.py` starts real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.algebra.solve import shared
from onnxgrail.core import Array, Block, Change, Probe, Slot, View
from onnxgrail.errors import LostProcessError
from onnxgrail.machine.group import torchrun
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.journal import Folder
from onnxgrail.narrowing import grail, order
from onnxgrail.narrowing.choosing import Run
from tests.shorter import shorter
from tests.unit.members import played

from . import nets

CHOICES: dict[str, dict[str, Any]] = {
    "open loop": {"compensate": "grail"},
    "closed loop": {"compensate": "grail", "closed_loop": True},
    "best": {"compensate": "best"},
    "obs": {"compensate": "grail", "selector": "obs"},
    "l2": {"compensate": "grail", "selector": "l2"},
    "fold": {"reducer": "fold", "compensate": "grail"},
    "few bits": {"compensate": "best", "quantize": "int4"},
    "search": {"max_loss": 0.2, "minimize": "params", "unit_ratio": None},
    "statistics": {"compensate": "grail", "save_stats": "s.npz"},
}


def small(monkeypatch: pytest.MonkeyPatch, *, joint: bool) -> None:
    """Bounds that small models reach: blocks in steps of their own, and solves that several processes share."""
    monkeypatch.setattr(grail, "TOGETHER", 1)
    monkeypatch.setattr(order, "JOINT", 1 if joint else 2**62)
    monkeypatch.setattr(shared, "MUCH", 1)
    monkeypatch.setattr(shared, "DEEP", 1)


def written(folder: Path, size: int, model: Path, data: Any, **choices: Any) -> bytes:
    """The bytes that so many processes write."""
    output = folder / f"{size}.onnx"
    common: dict[str, Any] = {"unit_ratio": 0.3, "check": False, "force": True, "round_to": 1, **choices}
    common = {name: value for name, value in common.items() if value is not None}
    if "save_stats" in common:
        common["save_stats"] = folder / f"{size} {common['save_stats']}"

    def work(group: Group) -> None:
        onnxgrail.compress(model, output, data=data, group=group, **common)

    if size == 1:
        work(SOLO)
    else:
        played(size, work)
    return output.read_bytes()


@pytest.fixture
def case(tmp_path: Path) -> tuple[Path, Any]:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx", nets.vectors(300)


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("name", CHOICES)
def test_any_number_of_processes_writes_the_bytes_of_one(
    name: str, joint: bool, case: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, joint=joint)
    wanted = written(tmp_path, 1, *case, **CHOICES[name])
    sources, exchange = used(monkeypatch)
    for size in (2, 3, 4):
        assert written(tmp_path, size, *case, **CHOICES[name]) == wanted, size
        if not joint and name in ("open loop", "obs"):  # of three blocks; `l2` reads what the block before changed
            assert sources == set(range(min(size, 3))), "every process decides"
    if name in ("closed loop", "best", "few bits"):
        assert bool(exchange) == joint, "several processes solve together"


def used(monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], set[int]]:
    """The processes whose decisions are shared from now on, and those that exchange parts of solutions."""
    sources, exchange = set[int](), set[int]()
    share, exchanged = torchrun.Processes.share, torchrun.Processes.exchange

    def sharing(self: torchrun.Processes, record: Record | None, source: int = 0) -> Record | None:
        sources.add(source)
        return share(self, record, source)

    def exchanging(self: torchrun.Processes, *arguments: Any) -> list[Sequence[Array]]:
        exchange.add(self.rank)
        return exchanged(self, *arguments)

    monkeypatch.setattr(torchrun.Processes, "share", sharing)
    monkeypatch.setattr(torchrun.Processes, "exchange", exchanging)
    return sources, exchange


@pytest.mark.parametrize("mode", ["open loop", "best"])
def test_a_killed_run_goes_on_with_another_number_of_processes(
    mode: str, case: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, joint=True)
    wanted = written(tmp_path, 1, *case, **CHOICES[mode])
    for number, (before, after) in enumerate([(3, 2), (1, 4), (4, 1)]):
        kept, put, left = tmp_path / f"kept {number}", Folder.put, iter(range(2))

        def dying(self: Folder, key: str, record: Record, put: Any = put, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            put(self, key, record)

        monkeypatch.setattr(torchrun, "FAREWELL", 0.2)
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "put", dying)
            with pytest.raises(KeyboardInterrupt):
                written(tmp_path, before, *case, resume=kept, **CHOICES[mode])
        assert written(tmp_path, after, *case, resume=kept, **CHOICES[mode]) == wanted, (before, after)


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "together"])
def test_a_process_that_cannot_decide_its_block_ends_all(
    joint: bool, case: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the last process only; the others name it."""
    small(monkeypatch, joint=joint)
    monkeypatch.setattr(torchrun, "FAREWELL", 0.2)
    first, reasons = Run._first, dict[int, str]()

    def failing(self: Run, view: View) -> Change:
        if self.job.group.rank == 2:
            raise MemoryError
        return first(self, view)

    monkeypatch.setattr(Run, "_first", failing)
    common: dict[str, Any] = {"unit_ratio": 0.3, "check": False, **CHOICES["closed loop" if joint else "open loop"]}

    def work(group: Group) -> None:
        try:
            onnxgrail.compress(case[0], tmp_path / "o.onnx", data=case[1], group=group, **common)
        except (LostProcessError, MemoryError) as error:
            reasons[group.rank] = f"{type(error).__name__} {error}"
            raise

    with pytest.raises(LostProcessError):
        played(3, work)
    assert reasons[0] == f"LostProcessError process 2 of 3 failed: MemoryError. {torchrun.CONTINUE}"
    assert reasons[1] == reasons[0]
    assert reasons[2].startswith("MemoryError")
    assert not (tmp_path / "o.onnx").exists()


def test_blocks_are_dealt_out_by_their_cost() -> None:
    """Waves of blocks that do not depend on each other; equal statistics stay together; a large block is shared."""
    a, b, c, d = (block(name) for name in "abcd")
    cost = {"a": 4.0, "b": 3.0, "c": 3.0, "d": 1.0}
    two = SimpleNamespace(size=2, agree=lambda _: True)
    found = order.deal([[a, b, c, d]], lambda one: cost[one.name], lambda _: [], two)
    assert [found.of(one).ranks.start for one in (a, b, c, d)] == [0, 1, 1, 0]
    found = order.deal([[a, b, c, d]], lambda one: cost[one.name], lambda one: [PROBE] if one in (a, d) else [], two)
    assert found.of(a) == found.of(d)
    found = order.deal([[a], [b]], lambda _: 2.0 * order.JOINT, lambda _: [], two)
    assert [len(found.of(one).ranks) for one in (a, b)] == [2, 2]
    assert order.Deal([[a]]).of(b).ranks == range(1)


def test_blocks_that_read_what_others_change_wait_for_them() -> None:
    a = block("a", ("w1", "producer"), ("w2", "consumer"))
    b = block("b", ("w2", "producer"), ("w3", "consumer"))
    c = block("c", ("w4", "producer"), ("w3", "consumer"))
    assert order.waves([a, b], producers=False) == [[a, b]]
    assert order.waves([a, b], producers=True) == [[a], [b]]
    assert order.waves([a, b, c], producers=False) == [[a, b], [c]]
    assert order.waves([], producers=True) == []


PROBE = Probe(value="x", axis=1, index=np.arange(4)[:, None], pooled=False)


def block(name: str, *slots: tuple[str, Any]) -> Block:
    made = tuple(
        Slot(param=param, initializer=param, axis=0, index=np.arange(4)[:, None], role=role) for param, role in slots
    )
    return Block(
        name=name, kind="mlp", units=4, unit_size=1, slots=made, probes=(), ids=np.arange(4), span=(0, 1), nodes=()
    )


@pytest.mark.parametrize("model", ["digits_vit", "digits_resnet"])
@pytest.mark.parametrize("mode", ["open loop", "closed loop", "best"])
def test_networks_that_share_weights_between_blocks(
    model: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, heads and convolutions: a weight that one block changes is read by the next."""
    small(monkeypatch, joint=True)
    source = shorter(model, tmp_path)
    with np.load(source.calibration) as file:
        data = {name: file[name][:24] for name in file.files}
    wanted = written(tmp_path, 1, source.model, data, batch_size=4, **CHOICES[mode])
    for size in (2, 5):
        assert written(tmp_path, size, source.model, data, batch_size=4, **CHOICES[mode]) == wanted, size
