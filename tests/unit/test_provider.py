"""Memory of a GPU that torch shares, one arena for all sessions, and the nodes that a GPU leaves to the CPU."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime import provider, session
from onnxgrail.calibration.runtime.session import CPU, Session
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.device import CUDA, Device
from onnxgrail.report.notes import left_text
from tests.oracle import prepared_of

WORDS = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 8589934592"


def cached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a torch in place; return a list of what it gives back."""
    given: list[str] = []
    cuda = types.SimpleNamespace(empty_cache=lambda: given.append("cache"))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    return given


class Full:
    """A session of ONNX Runtime whose first runs find no memory."""

    def __init__(self, failures: int) -> None:
        self._left = failures

    def get_inputs(self) -> list[Any]:
        return []

    get_outputs = get_providers = get_inputs

    def run(self, *_: Any) -> list[Any]:
        self._left -= 1
        if self._left >= 0:
            raise RuntimeError(WORDS)
        return []


def test_a_run_is_tried_again_without_the_cache_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = cached(monkeypatch)
    assert Session(Full(1), ()).run({}) == {}
    assert given == ["cache"]
    with pytest.raises(ModelError, match=r"Failed to allocate memory .* Try a smaller --batch-size"):
        Session(Full(2), ()).run({})
    monkeypatch.delitem(sys.modules, "torch")
    assert Session(Full(1), ()).run({}) == {}


def test_a_model_without_room_is_not_taken_for_a_device_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; file=/src/cuda.cc ; line=1")

    given = cached(monkeypatch)
    fake: Any = types.SimpleNamespace(InferenceSession=failing)
    with pytest.raises(ModelError, match=r"no memory for this model on cuda:0: .*out of memory"):
        session._started(fake, b"", None, Device("cuda", 0, (CUDA,)))
    assert given == ["cache"]


def test_an_error_in_the_model_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given, calls = cached(monkeypatch), []

    def failing() -> None:
        calls.append(1)
        raise RuntimeError("Invalid rank for input: x")

    with pytest.raises(RuntimeError, match="Invalid rank"):
        provider.room_for(failing, failing)
    assert (given, len(calls)) == ([], 1)


@pytest.mark.parametrize("memory", [None, 20 * 2**30])
def test_sessions_on_a_gpu_share_one_arena(memory: int | None) -> None:
    made: list[Any] = []
    ort: Any = types.ModuleType("fake")
    ort.OrtArenaCfg = dict
    ort.OrtAllocatorType = types.SimpleNamespace(ORT_ARENA_ALLOCATOR="arena")
    ort.OrtMemType = types.SimpleNamespace(DEFAULT="default")
    ort.OrtMemoryInfo = lambda *given: given
    ort.create_and_register_allocator_v2 = lambda *given: made.append(given)
    device = Device("cuda", 1, (CUDA, *CPU), memory)
    assert provider.one_arena(ort, device)
    assert provider.one_arena(ort, device)
    ((name, place, options, arena),) = made
    assert (name, place, options) == (CUDA, ("Cuda", "arena", 1, "default"), {"device_id": "1"})
    assert arena["max_mem"] == (memory or 0)
    assert not provider.one_arena(types.ModuleType("an older one"), device)


def test_nodes_that_a_gpu_leaves_to_the_cpu_are_named() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 4] x) => (float[N, 4] y) {
            size = Shape(x)
            a = Relu(x)
            b = Relu(a)
            c = Exp(b)
            y = Reshape(c, size)
        }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for node in model.graph:
        node.name = f"node of {node.outputs[0].name}"
    ort = session.runtime()
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    handle = ort.InferenceSession(to_bytes(model), options, providers=list(CPU))
    provider.note_left(handle)  # outside of a command
    with provider.noting_left():
        provider.note_left(handle)  # here all nodes are on the CPU
        provider.note_left(handle)  # pieces of a model are opened often
        provider.note_left(object())  # an older runtime does not say
        found = provider.left()
    assert provider.left() == {}
    assert found == {node.name: node.op_type for node in model.graph}
    feed = {"x": np.ones((2, 4), np.float32)}
    batches = Batches(feeds=(lambda: feed,), samples=2, source="test")
    prepared = prepared_of(model, trace(model, observe(model, feed)), batches)
    assert left_text(prepared, found) == (
        "these nodes ran on the CPU, since ONNX Runtime has no kernels for them on the GPU: "
        "Exp (1), Relu (2), Reshape (1)"
    )
    assert left_text(prepared, {"node of size": "Shape"}) == ""
    assert left_text(prepared, {"made by ONNX Runtime": "Gelu"}).endswith("Gelu (1)")
