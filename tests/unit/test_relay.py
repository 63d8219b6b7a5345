"""A model run a stretch at a time shows what the whole shows, and holds little of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from bench import large_model
from onnxgrail.calibration import observe as observing
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.calibration.stream import relay
from onnxgrail.calibration.stream.relay import STRETCH, Relay
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.trace.facts import constants
from tests.tiny import cnn, feed, mlp, tiny


def llama(folder: Path) -> tuple[ir.Model, Feed]:
    path = folder / "model.onnx"
    large_model.write(path, depth=2, width=32, dtype="fp32", hidden=64, heads=4, words=50, tokens=8)
    return model_file.load(path), {"ids": np.arange(16).reshape(2, 8)}


def drawn(make: Callable[[], ir.Model]) -> Callable[[Path], tuple[ir.Model, Feed]]:
    def both(_: Path) -> tuple[ir.Model, Feed]:
        model = make()
        return model, feed(model)

    return both


@pytest.mark.parametrize("make", [drawn(lambda: mlp(9)), drawn(cnn), llama], ids=["mlp", "cnn", "llama"])
@pytest.mark.parametrize("stretch", [2, 7])
def test_facts_are_those_of_the_whole(
    make: Callable[[Path], tuple[ir.Model, Feed]], stretch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, arrays = make(tmp_path)
    assert len(model.graph) < STRETCH
    whole = observe(model, arrays)
    monkeypatch.setattr(observing, "STRETCH", stretch)
    parts = observe(model, arrays)
    assert (parts.shapes, parts.dtypes, parts.varying) == (whole.shapes, whole.dtypes, whole.varying)
    assert parts.values.keys() == whole.values.keys()
    for name, array in whole.values.items():
        np.testing.assert_array_equal(parts.values[name], array)


def test_only_what_is_read_later_outlives_its_stretch(tmp_path: Path) -> None:
    model, arrays = llama(tmp_path)
    names = [v.name for node in model.graph for v in node.outputs]
    seen, most = 0, 0
    with Relay(model, names, constants(model), stretch=8) as relay:
        running = relay.run(arrays)
        held: list[weakref.ref[np.ndarray]] = []
        for found in running:
            most = max(most, sum(ref() is not None for ref in held))
            held += [weakref.ref(array) for array in found.values()]
            seen += len(found)
            del found
    assert seen == len(names)
    assert most < 8  # of those of all stretches before, while the next one's are handed out


def test_what_the_model_does_not_take_no_stretch_takes() -> None:
    model = tiny("float[3,6] x => float[3,6] y", "a = Relu(x)\nb = Relu(a)\nc = Relu(b)\ny = Relu(c)", {})
    with Relay(model, ["a", "b", "c", "y"], constants(model), stretch=2) as relay:
        assert [list(found) for found in relay.run({"x": np.ones((3, 6), np.float32)})] == [["a", "b"], ["c", "y"]]
        with pytest.raises(ModelError, match="ONNX Runtime failed"):
            list(relay.run({"x": np.ones((2, 6), np.float32)}))


def test_where_no_stretch_can_be_had_the_whole_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(9)
    monkeypatch.setattr(observing, "STRETCH", 2)
    whole, opened = Relay.run, []

    def run(self: Relay, arrays: Feed) -> object:
        opened.append(len(self._stops))
        if len(self._stops) > 1:
            raise ModelError("no")
        return whole(self, arrays)

    monkeypatch.setattr(Relay, "run", run)
    assert observe(model, feed(model)).shapes
    assert opened[0] > 1
    assert opened[1] == 1


@pytest.mark.parametrize("make", [drawn(lambda: mlp(9)), drawn(cnn), llama], ids=["mlp", "cnn", "llama"])
def test_a_deep_model_in_pieces_has_the_outputs_of_the_whole(
    make: Callable[[Path], tuple[ir.Model, Feed]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, arrays = make(tmp_path)
    assert relay.in_pieces(model, [arrays]) is None, "it is not deep"
    monkeypatch.setattr(relay, "DEEP", 1)
    monkeypatch.setattr(relay, "STRETCH", 2)
    with open_session(pack(model), Setup(optimise=False)) as session:
        wanted = session.run(arrays)
    found, again = relay.in_pieces(model, [arrays, arrays]) or (None, None)
    assert found is not None
    assert again is not None
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[name], again[name])


def test_a_model_that_hands_out_its_input_is_run_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DEEP", 1)
    model = tiny("float[N,4] x => float[N,4] y, float[N,4] x", "y = Relu(x)", {})
    assert relay.in_pieces(model, [feed(model)]) is None
