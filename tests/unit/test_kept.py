"""Times are measured once per machine: what is kept, on what it depends, and what happens to damaged files."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.runtime import latency, measured, profile, session
from onnxgrail.calibration.runtime.profile import Kernel, Profile, profiles_of
from onnxgrail.core import Recipe
from onnxgrail.graph.io.serial import pack
from onnxgrail.machine.files import kept
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.search.kernels import measured_kernels
from tests.tiny import cnn, mlp, tiny

NUMBER: Codec[int] = Codec(lambda n: Record(notes={"n": n}), lambda record: int(record.notes["n"]))
CPU = session.CPU


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which times are kept."""
    monkeypatch.setenv("ONNXGRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def number(about: dict[str, Any], made: Iterator[int]) -> int:
    return kept.once(about, lambda: next(made), NUMBER)


def test_computed_once_for_all_that_it_depends_on(cache: Path) -> None:
    made = count()
    assert [number({"a": a, "b": [1, "x"]}, made) for a in (1, 1, 2, 1, 2)] == [0, 0, 1, 0, 1]
    assert len(list(cache.iterdir())) == 2
    assert all(kept.OWN.fullmatch(path.name) for path in cache.iterdir())


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "no text": lambda path: path.write_bytes(os.urandom(99)),
    "no object": lambda path: path.write_text("[1]"),
    "deep": lambda path: path.write_text("[" * 10**5),
    "of another run": lambda path: path.write_text('{"about": {"a": 2}, "notes": {"n": 7}}'),
    "of another program": lambda path: path.write_text('{"about": {"a": 1}, "notes": {"m": 7}}'),
    "no number": lambda path: path.write_text('{"about": {"a": 1}, "notes": {"n": "x"}}'),
    "infinite": lambda path: path.write_text('{"about": {"a": 1}, "notes": {"n": Infinity}}'),
    "no dictionary": lambda path: path.write_text('{"about": {"a": 1}, "notes": 3}'),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("how", BROKEN)
def test_damaged_files_are_written_again(cache: Path, how: str) -> None:
    made = count(1)
    assert number({"a": 1}, made) == 1
    (path,) = cache.iterdir()
    BROKEN[how](path)
    assert [number({"a": 1}, made) for _ in range(3)] == [2, 2, 2]
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("place", ["", "/proc/nowhere", "file", "file/inside", "folder of the file"])
def test_without_a_folder_results_are_computed_each_time(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / place if place and not place.startswith("/") else Path(place)
    if place == "folder of the file":
        (folder / kept_name({"a": 1})).mkdir(parents=True)
    monkeypatch.setenv("ONNXGRAIL_CACHE", str(folder) if place else "")
    made = count()
    assert [number({"a": 1}, made) for _ in range(2)] == [0, 1]


def kept_name(about: dict[str, Any]) -> str:
    """The name of the file, learned in a folder that can be written."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def test_a_folder_that_cannot_be_written(cache: Path) -> None:
    made = count()
    assert number({"a": 1}, made) == 0
    (path,) = cache.iterdir()
    path.chmod(0o400)
    cache.chmod(0o500)
    try:
        if os.access(cache, os.W_OK):  # root may write everywhere
            assert number({"a": 1}, made) == 0
        else:
            assert [number({"a": n}, made) for n in (1, 2, 2)] == [0, 1, 2]
    finally:
        cache.chmod(0o700)


def test_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONNXGRAIL_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert kept.cache_folder() == tmp_path / "own" / "onnxgrail"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    assert kept.cache_folder() == tmp_path / ".cache" / "onnxgrail"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert kept.cache_folder() == tmp_path / "Library" / "Caches" / "onnxgrail"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert kept.cache_folder() == tmp_path / "local" / "onnxgrail"

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert kept.cache_folder() is None


def test_runs_at_the_same_time_agree(cache: Path) -> None:
    together, found = threading.Barrier(8), list[int]()

    def run(own: int) -> None:
        def make() -> int:
            together.wait()
            return own

        found.append(kept.once({"a": 1}, make, NUMBER))

    threads = [threading.Thread(target=run, args=(own,)) for own in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert number({"a": 1}, iter(())) == found[0]
    assert len(list(cache.iterdir())) == 1


def test_files_that_are_not_used_make_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "ROOM", 4 * kept.BLOCK)
    made = count()
    cache.mkdir()
    (cache / "other.json").write_text("of the user")
    for n in range(10):
        number({"a": n}, made)
        number({"a": 0}, made)
        for age, path in enumerate(sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, ns=(age, age))  # times of files may be coarse
    assert len(list(cache.iterdir())) == 5
    assert (cache / "other.json").read_text() == "of the user"
    assert number({"a": 0}, iter(())) == 0
    assert number({"a": 9}, iter(())) == 9
    assert number({"a": 1}, made) == 10


# ------------------------------------------------------------------------------------------------------- of what


BODY = "a = Conv<pads = [1, 1, 1, 1]>(x, w)\ny = Reshape(a, shape)"
SHAPES = {"w": (16, 8, 3, 3), "shape": np.array([0, -1])}
FEED = {"x": np.zeros((1, 8, 6, 6), np.float32)}


def model(body: str = BODY, signature: str = "float[N,8,6,6] x => float[N,M] y", **more: Any) -> ir.Model:
    return tiny(signature, body, SHAPES | more)


@pytest.fixture
def measures(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The profiles that were measured, not kept."""
    done: list[Any] = []

    def stub(sources: Any, feeds: Any, providers: Any) -> tuple[Profile, ...]:
        done.append((sources, feeds, providers))
        ms = float(len(done))
        return tuple(Profile(kernels=(Kernel(name="a", op="Conv", ms=ms, took=(1, 8), gave=()),), ms=ms) for _ in feeds)

    monkeypatch.setattr(profile, "_profiled", stub)
    return done


def test_times_depend_on_operators_shapes_types_and_attributes(measures: list[Any]) -> None:
    first = profiles_of([pack(model())], [FEED], providers=CPU)
    assert profiles_of([pack(model())], [FEED], providers=CPU) == first
    told = model()
    told.graph.initializers["w"].const_value = ir.tensor(np.ones((16, 8, 3, 3), np.float32), name="w")
    told.metadata_props["note"] = told.graph.node(0).metadata_props["note"] = "of this run"
    told.graph.node(0).doc_string = told.doc_string = "of this run"
    told.producer_name = "another exporter"
    assert profiles_of([pack(told)], [FEED], providers=CPU) == first
    assert len(measures) == 1
    others = [
        model(w=(16, 8, 1, 1)),
        model(shape=np.array([0, 8, -1])),
        model(BODY.replace("[1, 1, 1, 1]", "[2, 2, 2, 2]")),
        model(BODY.replace("Reshape(a, shape)", "Relu(a)")),
    ]
    for other in others:
        assert profiles_of([pack(other)], [FEED], providers=CPU) != first
    assert profiles_of([pack(model())], [{"x": np.zeros((2, 8, 6, 6), np.float32)}], providers=CPU) != first
    assert profiles_of([pack(model())], [{"x": FEED["x"].astype(np.float64)}], providers=CPU) != first
    assert profiles_of([pack(model()), pack(model())], [FEED, FEED], providers=CPU)[0] != first[0]
    assert len(measures) == 1 + len(others) + 3
    assert profiles_of([pack(model())], [FEED], providers=CPU) == first


def test_large_weights_count_by_shape_and_type(measures: list[Any]) -> None:
    large = [model(w=array) for array in (np.ones((64, 8, 9, 9), np.float32), np.zeros((64, 8, 9, 9), np.float32))]
    assert pack(large[0]).weights
    assert len({profiles_of([pack(one)], [FEED], providers=CPU) for one in large}) == 1
    profiles_of([pack(model(w=np.ones((64, 8, 9, 8), np.float32)))], [FEED], providers=CPU)
    assert len(measures) == 2


def test_times_depend_on_runtime_processor_threads_and_libraries(
    measures: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run() -> float:
        return profiles_of([pack(model())], [FEED], providers=CPU)[0].ms

    (tmp_path / "ops.so").write_bytes(b"library")
    first = run()
    runtime = type("Runtime", (), {"__version__": "0.1"})
    changes: list[tuple[str, Any]] = [
        ("count", lambda: 99),
        ("machine", lambda: "another, 2 cores"),
        ("_processor", lambda: "other instructions"),
        ("runtime", lambda: runtime),
        ("FORMAT", measured.FORMAT + 1),
    ]
    for name, other in changes:
        with monkeypatch.context() as context:
            context.setattr(measured, name, other)
            assert run() != first, name
            assert run() != first, name
        assert run() == first
    token = session.LIBRARIES.set((str(tmp_path / "ops.so"),))
    try:
        assert run() != first
    finally:
        session.LIBRARIES.reset(token)
    assert len(measures) == 2 + len(changes)
    profiles_of([pack(model())], [FEED], providers=("Other", *CPU))
    profiles_of([pack(model())], [FEED], providers=("Other", *CPU))
    assert len(measures) == 4 + len(changes)  # times of other devices are not kept


@pytest.mark.parametrize("ms", ["NaN", "-1.0", "Infinity", "1e300", '"1 s"', "null", "1" + "0" * 400])
def test_times_that_are_none_are_measured_again(ms: str, cache: Path, measures: list[Any]) -> None:
    (first,) = profiles_of([pack(model())], [FEED], providers=CPU)
    (path,) = cache.iterdir()
    path.write_text(path.read_text().replace('"ms": [1.0]', f'"ms": [{ms}]'))
    (again,) = profiles_of([pack(model())], [FEED], providers=CPU)
    assert (first.ms, again.ms) == (1.0, 2.0)
    assert again == profiles_of([pack(model())], [FEED], providers=CPU)[0]


def test_what_is_kept_is_what_was_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, feeds = [pack(cnn((32, 24)))], [{"x": np.zeros((1, 3, 6, 6), np.float32)}]
    first = profiles_of(sources, feeds, providers=CPU)
    pair = latency.in_turn(sources[0], sources[0], (feeds[0], feeds[0]), providers=CPU)
    monkeypatch.setattr(profile, "_profiled", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(latency, "_turns", lambda *_, **__: pytest.fail("measured again"))
    assert profiles_of(sources, feeds, providers=CPU) == first
    assert latency.in_turn(sources[0], sources[0], (feeds[0], feeds[0]), providers=CPU) == pair
    assert sum(kernel.ms for kernel in first[0].kernels) > 0
    assert len(list(cache.iterdir())) == 2


def test_the_model_of_latency_is_that_of_the_last_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(mlp(1, 16), None, Job(recipe=Recipe(samples=2, batch_size=2)))
    first = measured_kernels(prepared, prepared.survey.blocks, Recipe())
    assert first.measured
    assert list(cache.iterdir())
    monkeypatch.setattr(profile, "_profiled", lambda *_: pytest.fail("measured again"))
    assert measured_kernels(prepared, prepared.survey.blocks, Recipe()) == first
