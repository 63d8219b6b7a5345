"""Which device a process takes, what ONNX Runtime is told about it, and that nothing falls back in silence."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest

import onnxgrail
from onnxgrail.calibration.devices import lanes
from onnxgrail.calibration.devices.values import ROOM, ValueLane
from onnxgrail.calibration.runtime import provider, session
from onnxgrail.errors import DeviceError, UsageError
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.machine.device import CUDA, MEMORY, Device, device_of
from onnxgrail.machine.group import torchrun
from tests.tiny import mlp

BOTH = (CUDA, "CPUExecutionProvider")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", MEMORY):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("numbers", "local", "visible", "wanted"),
    [
        ("", "", "", 0),
        (":1", "", "", 1),
        ("", "1", "", 1),
        ("", "3", "4,6,7,8", 3),
        ("", "1", "6", 0),  # a scheduler shows each process its own
        (":2,3", "0", "", 2),
        (":2,3", "1", "", 3),
    ],
)
def test_each_process_takes_its_gpu(
    numbers: str, local: str, visible: str, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", local), ("WORLD_SIZE", "4" if local else ""), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.setenv(name, value)
    device = device_of((f"{CUDA}{numbers}", "CPUExecutionProvider"))
    assert (device.kind, device.number, device.place, device.names) == ("cuda", wanted, f"cuda:{wanted}", BOTH)


def test_a_provider_that_is_named_twice_counts_once() -> None:
    assert device_of(("CPUExecutionProvider", "CPUExecutionProvider")).names == ("CPUExecutionProvider",)
    assert device_of((f"{CUDA}:1", CUDA, "CPUExecutionProvider")).names == BOTH


def test_what_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"2 GPUs .* torchrun --nproc-per-node 2"):
        device_of((f"{CUDA}:0,1",))
    with pytest.raises(UsageError, match="cuda:0,1"):
        device_of((f"{CUDA}:one",))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(DeviceError, match="process 1 of this machine has no GPU"):
        device_of((f"{CUDA}:0",))


def test_other_providers_are_handed_on_as_they_are() -> None:
    assert device_of(("CPUExecutionProvider",)) == Device()
    assert device_of(("A", "B")).providers == ["A", "B"]


def test_the_runtime_sums_in_float32_and_its_arena_grows_by_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, told), cpu = device_of((f"{CUDA}:1", "CPUExecutionProvider")).providers
    assert (name, cpu) == BOTH
    assert told["device_id"] == "1"
    assert told["use_tf32"] == "0"
    assert told["arena_extend_strategy"] == "kSameAsRequested"
    assert "gpu_mem_limit" not in told
    monkeypatch.setenv(MEMORY, "20G")
    (_, told), _ = device_of(BOTH).providers
    assert told["gpu_mem_limit"] == str(20 * 2**30)
    monkeypatch.setenv(MEMORY, "much")
    with pytest.raises(UsageError, match="20G"):
        device_of(BOTH)


def without_cuda() -> None:
    ort = session.runtime()
    if CUDA in ort.get_available_providers():
        pytest.skip("this build of ONNX Runtime has CUDA")


def test_a_build_without_cuda_is_named_with_the_fix() -> None:
    without_cuda()
    with pytest.raises(onnxgrail.DeviceError, match=r"no CUDAExecutionProvider.*pip install 'onnxgrail\[gpu\]'"):
        onnxgrail.compress(to_bytes(mlp()), providers=BOTH, ratio=0.3)


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_silently_got_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda()
    ort = session.runtime()
    told: list[Any] = []

    def opened(*args: Any, **options: Any) -> Any:
        told.append(options)
        return ort.InferenceSession(*args, **options)

    fake: Any = types.ModuleType("fake")
    for name in ("SessionOptions", "GraphOptimizationLevel", "ExecutionOrder", "OrtValue"):
        setattr(fake, name, getattr(ort, name))
    fake.InferenceSession, fake.get_available_providers = opened, lambda: list(BOTH)
    monkeypatch.setattr(session, "runtime", lambda: fake)
    with pytest.raises(DeviceError, match=r"ONNX Runtime gave CPUExecutionProvider.*onnxgrail\[gpu\]"):
        onnxgrail.compress(to_bytes(mlp()), providers=BOTH, ratio=0.3)
    assert told[0]["enable_fallback"] == 0
    assert told[0]["providers"][0][0] == CUDA


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            "CUDA failure 100: no CUDA-capable device is detected ; GPU=0 ; hostname=h ; file=/src/cuda.cc ; line=1",
            "cuda:7 does not start: CUDA failure 100: no CUDA-capable device is detected.",
        ),
        ("Invalid device ID: 7 must be between 0 and 1 (exclusive).", "cuda:7 does not start: Invalid device ID: 7"),
    ],
)
def test_a_device_that_does_not_start_is_no_fault_of_the_model(words: str, wanted: str) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        raise RuntimeError(words)

    fake: Any = types.SimpleNamespace(InferenceSession=failing)
    with pytest.raises(DeviceError) as error:
        session._started(fake, b"", None, device_of((f"{CUDA}:7",)))
    assert str(error.value).startswith(wanted)
    with pytest.raises(onnxgrail.ModelError):
        session._started(fake, b"", None, Device())


def test_libraries_of_cuda_are_loaded_once() -> None:
    loaded: list[str] = []
    ort: Any = types.SimpleNamespace(
        get_available_providers=lambda: list(BOTH), preload_dlls=functools.partial(loaded.append, "all")
    )
    for _ in range(3):
        provider.check_providers(ort, BOTH)
    assert loaded == ["all"]


def test_what_is_done_without_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lanes.why_host(("CPUExecutionProvider",)) == ""
    assert lanes.lane_of(("CPUExecutionProvider",)) is lanes.HOST
    monkeypatch.setitem(sys.modules, "onnxgrail.calibration.devices.tensors", None)
    assert lanes.why_host(BOTH).startswith("torch is not installed")
    assert "ONNX Runtime adds up second moments on the GPU" in lanes.why_host(BOTH)
    way = lanes.lane_of((f"{CUDA}:1", "CPUExecutionProvider"))
    assert isinstance(way, ValueLane)
    assert (way._device.place, way.room) == ("cuda:1", ROOM)
    monkeypatch.setenv(MEMORY, "500M")
    assert lanes.lane_of(BOTH).room == 500 * 2**20


def test_sums_travel_between_gpus_and_words_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, text = (types.SimpleNamespace(is_floating_point=kind) for kind in (True, False))
    torch: Any = types.SimpleNamespace()
    chosen, called = [], {}
    torch.cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 6, set_device=chosen.append)
    torch.distributed = types.SimpleNamespace(
        is_nccl_available=lambda: True,
        init_process_group=lambda backend, **rest: called.update(rest, backend=backend),
        destroy_process_group=lambda: None,
    )
    monkeypatch.setattr(torchrun, "_torch", lambda: torch)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with torchrun.join(providers=(f"{CUDA}:2,5",)) as group:
        assert isinstance(group, torchrun.Processes)
        assert [group._way(kind) for kind in (sums, text)] == ["cuda:5", "cpu"]
    assert (chosen, called["backend"]) == ([5], "cpu:gloo,cuda:nccl")
    with torchrun.join(providers=("CPUExecutionProvider",)):
        assert called["backend"] == "gloo"
    with (
        pytest.raises(DeviceError, match="no cuda:6: torch sees 6 GPUs"),
        torchrun.join(providers=(f"{CUDA}:5,6",)),
    ):
        pass
