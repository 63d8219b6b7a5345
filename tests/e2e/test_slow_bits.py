"""`--quantize int4|int8-weights` where time is minimized: kernels that are slower on this machine are not taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxgrail
from onnxgrail.core import Recipe
from onnxgrail.errors import ModelError
from onnxgrail.finishing import empty
from onnxgrail.finishing import speed as whole
from onnxgrail.narrowing.bits import speed, stage
from onnxgrail.search import latency
from onnxgrail.search.kernels import Kernels
from tests.tiny import tiny

from . import nets

ROWS = nets.vectors(500, 24)["x"]
FEED, JUDGES = {"x": ROWS[:300]}, {"x": ROWS[300:]}
SIZES = (24, 96, 80, 80, 80, 10)  # two matrices of the same size, of which one has a bias inside
PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", "GatherBlockQuantized", "Gather")

Times = Callable[[ir.Node], float]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """An MLP that gives scores of classes: a softmax does not see what they have in common."""
    model = nets.mlp(SIZES)
    for place, tensor in enumerate(model.graph.initializer):
        if tensor.name in ("w4", "b4"):
            array = numpy_helper.to_array(tensor)  # w4 is transposed
            centered = numpy_helper.from_array(array - array.mean(axis=0, keepdims=True), tensor.name)
            model.graph.initializer[place].CopyFrom(centered)
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture(autouse=True)
def _whole_runs_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These models take microseconds, in which other work on the machine decides, also about widths."""
    monkeypatch.setattr(empty, "slower", lambda *_: None)
    monkeypatch.setattr(latency, "measured_kernels", lambda *_: Kernels(note="not here"))
    monkeypatch.setenv("ONNXGRAIL_CACHE", str(tmp_path / "cache"))


def timed(monkeypatch: pytest.MonkeyPatch, few: Times) -> list[int]:
    """Give nodes of the float model 1 ms and those in few bits other times; return the numbers of nodes measured."""
    seen: list[int] = []

    def times(models: Sequence[ir.Model], *_: Any, bare: bool) -> list[Mapping[str, float]]:
        assert bare
        seen.append(sum(node.op_type.startswith("MatMulNBits") for node in models[1].graph))
        whole = {node.name or "": 1.0 for node in models[0].graph if node.op_type in PRODUCTS}
        return [whole, {node.name or "": few(node) for node in models[1].graph if node.op_type in (*PRODUCTS, "Add")}]

    monkeypatch.setattr(speed, "durations", times)
    return seen


def inputs_of(node: ir.Node) -> int:
    return int(node.attributes["K"].as_int()) if "K" in node.attributes else 0


def small(path: Path, out: str, **choices: Any) -> tuple[Path, dict[str, Any]]:
    target = path.with_name(out)
    given = {"quantize": "int4", "data": FEED, "held_out": JUDGES, "max_loss": "20%", "effort": "fast"}
    return target, onnxgrail.compress(path, target, **{**given, "check": False, "force": True, **choices}).report.data


def reasons(report: dict[str, Any]) -> dict[str, str]:
    return {entry["weight"]: entry["reason"] for entry in report["quantization"]["matrices"]}


def far(path: Path, dense: Path, feed: Any) -> float:
    one, two = (ort.InferenceSession(p, providers=["CPUExecutionProvider"]).run(None, feed)[0] for p in (path, dense))
    return float(np.square(one - two).sum() / np.square(two).sum())


def test_what_is_slower_computes_in_float_and_is_named(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed(monkeypatch, lambda node: 0.8 if inputs_of(node) == 24 else 1.6 if inputs_of(node) > 24 else 0.0)
    found, report = small(wide, "o.onnx")
    told = reasons(report)
    assert len(seen) == 2  # the original, and the narrowed model
    assert told["w0"] == ""
    assert all("4 bits take 1.60 times as long as float" in told[name] for name in ("w1", "w2", "w3", "w4"))
    assert all("when it loads the model" in told[name] for name in ("w1", "w2", "w3", "w4"))
    assert any(note.startswith("4 weights are slower in few bits on this machine") for note in report["notes"])
    ops = Counter(node.op_type for node in onnx.load(found).graph.node)
    assert (ops["MatMulNBits"], ops["Cast"], ops["Gather"]) == (1, 4, 3)
    kinds = {m["weight"]: (m["bits"], m["rounding"]) for m in report["quantization"]["matrices"]}
    assert {kinds[name] for name in ("w1", "w2", "w3")} == {(4, "carried")}
    assert kinds["w4"] == (8, "nearest")  # so small that 4 bits take as many bytes with the nodes that convert them
    assert set(report["allocation"]["search"]["spared"]) == {"w1", "w2", "w3", "w4"}
    assert far(found, wide, JUDGES) < 0.2


@pytest.mark.parametrize("choices", [{"minimize": "size"}, {"max_loss": None, "ratio": 0}, {"symmetric": True}])
def test_all_have_few_bits_where_bytes_count_or_nothing_is_slower(
    choices: dict[str, Any], wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = timed(monkeypatch, lambda node: 1.04 if inputs_of(node) else 0.0)  # within noise
    found, report = small(wide, "o.onnx", **choices)
    assert set(reasons(report).values()) == {""}
    assert Counter(node.op_type for node in onnx.load(found).graph.node)["MatMulNBits"] == 5
    assert bool(seen) == ("symmetric" in choices)


def test_other_machines_get_all_in_few_bits(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.load(wide)
    model.opset_import[0].version = 13
    onnx.save(model, wide)
    seen = timed(monkeypatch, lambda _: 9.0)
    _, report = small(wide, "o.onnx", quantize="int8-weights", qdq=True)
    assert set(reasons(report).values()) == {""}
    assert not seen


def test_what_asks_for_speed() -> None:
    asks = ({"target_latency": "60%"}, {"max_loss": 0.01}, {"max_loss": 0.01, "minimize": "size"}, {"ratio": 0.3})
    assert [Recipe(**one).wants_latency for one in asks] == [True, True, False, False]


def test_kernels_of_one_kind_are_judged_together(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two equal matrices seems slower by noise: both have few bits."""
    mean = iter((1.3, 0.7) * 2)
    equal = {"m1", "z2/product", "m3"}  # inputs: 96, 80, 80
    timed(monkeypatch, lambda node: next(mean) if node.name in equal and inputs_of(node) == 80 else 0.0)
    _, report = small(wide, "o.onnx", include="nothing", quantize="int8-weights")
    assert set(reasons(report).values()) == {""}


def test_what_float_fuses_into_a_product_counts(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of a `Gemm` is an `Add` of its own after `MatMulNBits`."""
    timed(monkeypatch, lambda node: 0.6)
    _, report = small(wide, "o.onnx", quantize="int8-weights")
    assert all("8 bits take 1.20 times as long" in reason for reason in reasons(report).values())


def test_kernels_that_cannot_be_measured_are_told(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ModelError("no such kernel")

    monkeypatch.setattr(speed, "durations", fails)
    _, report = small(wide, "o.onnx")
    assert set(reasons(report).values()) == {""}
    assert any("the speed in few bits is not measured" in n and "no such kernel" in n for n in report["notes"])


def test_dry_runs_and_runs_that_go_on_give_the_same_bytes(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are kept in the folder of the run: a measurement that would come out otherwise is not made again."""
    seen = timed(monkeypatch, lambda node: 2.0 if inputs_of(node) == 80 else 0.5 if inputs_of(node) else 0.0)
    whole, written = small(wide, "o.onnx")
    wanted = whole.read_bytes()
    _, told = small(wide, "o.onnx", dry_run=True)
    assert told["model"]["bytes_after"] == written["model"]["bytes_after"] == len(wanted)
    fitted, before = stage.fitted, len(seen)

    def stops(*given: Any) -> Any:
        if len(seen) == before + 2:  # both models are measured: the written one is being rounded
            raise KeyboardInterrupt
        return fitted(*given)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "fitted", stops)
        with pytest.raises(KeyboardInterrupt):
            small(wide, "o.onnx", resume=wide.with_name("kept"))
    timed(monkeypatch, lambda node: 2.0 if inputs_of(node) in (24, 96) else 0.5)
    assert small(wide, "o.onnx", resume=wide.with_name("kept"))[0].read_bytes() == wanted


def test_half_precision_has_8_bits_where_4_are_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(nets.mlp(SIZES, dtype=np.float16), tmp_path / "h.onnx")
    timed(monkeypatch, lambda node: 2.0 if inputs_of(node) == 96 else 0.5 if inputs_of(node) else 0.0)
    data = {name: {"x": feed["x"].astype(np.float16)} for name, feed in (("data", FEED), ("held_out", JUDGES))}
    _, report = small(tmp_path / "h.onnx", "h4.onnx", **data)
    assert reasons(report)["w1"].startswith("on this machine 4 bits take 2.00 times as long as float")
    assert {one["weight"]: one["bits"] for one in report["quantization"]["matrices"]}["w1"] == 8
    assert report["quantization"]["left"] == []


def test_a_table_that_is_slower_keeps_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup in float reads what a runtime converts when it loads the model: 8 bits as well."""
    body = "e = Gather(table, ids)\na = MatMul(e, up)\nr = Relu(a)\ny = MatMul(r, down)"
    weights = {"table": (200, 64), "up": (64, 96), "down": (96, 40)}
    onnx.save(ir.to_proto(tiny("int64[N,T] ids => float[N,T,40] y", body, weights)), tmp_path / "t.onnx")
    rng = np.random.default_rng(0)
    data, held = ({"ids": rng.integers(0, 200, (64, 8))} for _ in range(2))
    timed(monkeypatch, lambda node: 2.0 if node.op_type == "GatherBlockQuantized" else 0.5)
    found, report = small(tmp_path / "t.onnx", "t4.onnx", data=data, held_out=held, max_loss="50%")
    assert "8 bits take 2.00 times as long as float" in reasons(report)["table"]
    ops = Counter(node.op_type for node in onnx.load(found).graph.node)
    assert (ops["Gather"], ops["GatherBlockQuantized"], ops["MatMulNBits"]) == (1, 0, 2)
    assert found.stat().st_size < 0.45 * (tmp_path / "t.onnx").stat().st_size
    assert far(found, tmp_path / "t.onnx", held) < 0.2


def test_kernels_beside_a_branch_that_no_sample_takes_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
        n = Shape<start=0, end=1>(x)
        many = Greater(n, most)
        h = If (many) <
            then_branch = yes () => (float[N,24] t) { k = Constant<value = float {2.0}>()  t = Mul(x, k) },
            else_branch = no () => (float[N,24] e) { e = Identity(x) }
        >
        a = MatMul(h, up)
        r = Relu(a)
        y = MatMul(r, down)
    """
    weights = {"most": np.array([10**6]), "up": (24, 96), "down": (96, 40)}
    onnx.save(ir.to_proto(tiny("float[N,24] x => float[N,40] y", body, weights, recorded=False)), tmp_path / "b.onnx")
    seen = timed(monkeypatch, lambda node: 2.0 if inputs_of(node) == 96 else 0.5)
    _, report = small(tmp_path / "b.onnx", "b4.onnx")
    assert len(seen) == 2
    assert [bool(reason) for reason in reasons(report).values()] == [False, True]


def test_measured_kernels_decide(wide: Path) -> None:
    """With the real timer: what is named as slower is in no kernel of few bits, everything else is."""
    found, report = small(wide, "o.onnx", quantize="int8-weights")
    slow = {name for name, reason in reasons(report).items() if reason}
    packed = {n.input[1].partition("/")[0] for n in onnx.load(found).graph.node if n.op_type == "MatMulNBits"}
    assert packed == {"w0", "w1", "w2", "w3", "w4"} - slow
    assert far(found, wide, JUDGES) < 0.2


@pytest.mark.parametrize(("kind", "bits"), [("fp16", 16), ("int8-dynamic", 8)])
@pytest.mark.parametrize("speed", [0.8, 1.1])
def test_a_model_of_a_tool_that_is_slower_is_not_taken(
    kind: str, bits: int, speed: float, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights have as many bits, and a runtime converts them when it loads the model."""
    monkeypatch.setattr(whole, "speed_of", lambda *_: speed)
    target, report = small(wide, f"{kind}.onnx", quantize=kind)
    ops = {node.op_type for node in onnx.load(target).graph.node}
    told = [note for note in report["quantization"]["notes"] if "times as long as float" in note]
    assert bool(told) == (speed < 1)
    if speed < 1:
        assert f"takes 1.25 times as long as float, so layers compute in float and only weights have {bits}" in told[0]
        assert not ops & {"MatMulInteger", "DynamicQuantizeLinear"}
        assert ops & {"Cast", "MatMul", "Gemm"} > {"Cast"}
    assert target.stat().st_size == report["model"]["bytes_after"] < bits / 24 * wide.stat().st_size
    assert far(target, wide, JUDGES) < 0.1
    _, report = small(wide, f"{kind}.s.onnx", quantize=kind, minimize="size")
    assert not any("times as long as float" in note for note in report["quantization"]["notes"])
