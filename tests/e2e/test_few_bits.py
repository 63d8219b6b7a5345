"""`--quantize int4` and `int8-weights`: only the weights of matrices, with errors carried on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.errors import DataError, ModelError, NothingToCompressError, OnnxGrailError, UsageError
from onnxgrail.narrowing.bits import stage
from onnxgrail.search.candidates import Candidates
from tests.e2e import nets
from tests.e2e.rounded import FEED, WHOLE, lost, run, small
from tests.tiny import tiny


@pytest.mark.parametrize(("kind", "symmetric"), [("int4", False), ("int8-weights", True)])
def test_carried_errors_beat_rounding_to_nearest(wide: Path, kind: str, symmetric: bool) -> None:
    found, report = small(wide, "carried.onnx", quantize=kind, symmetric=symmetric)
    plain, alone = small(wide, "nearest.onnx", quantize=kind, symmetric=symmetric, data=None, held_out=None)
    assert lost(found, wide) < 0.5 * lost(plain, wide)
    assert found.stat().st_size < 0.5 * wide.stat().st_size
    entry = report["quantization"]
    assert [m["rounding"] for m in entry["matrices"]] == ["carried"] * 4
    assert all(m["after"] < m["before"] for m in entry["matrices"])
    assert entry["ops"]["MatMulNBits"] == 4
    assert any("4 of 4 weights are rounded to nearest" in note for note in alone["notes"])


@pytest.mark.parametrize(
    "choices", [{"block_size": 16, "symmetric": True}, {"ratio": 0.3}, {"save_as_external_data": True}]
)
def test_a_dry_run_predicts_the_files(wide: Path, choices: dict[str, Any]) -> None:
    target, written = small(wide, "dry.onnx", **choices)
    files = list(wide.parent.glob("dry.onnx*"))
    assert len(files) == (2 if "save_as_external_data" in choices else 1)
    size = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink()
    _, told = small(wide, "dry.onnx", dry_run=True, **choices)
    assert not target.exists()
    assert told["model"]["bytes_after"] == written["model"]["bytes_after"] == size


def goes_on(make: Callable[..., tuple[Path, Any]], kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped after two stages and goes on gives the bytes of one that is not."""
    whole = make()[0].read_bytes()
    left = iter(range(2))
    fitted = stage.fitted

    def stopping(*words: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return fitted(*words)

    monkeypatch.setattr(stage, "fitted", stopping)
    with pytest.raises(KeyboardInterrupt):
        make(resume=kept)
    monkeypatch.setattr(stage, "fitted", fitted)
    assert make(resume=kept)[0].read_bytes() == whole


def test_the_same_run_gives_the_same_bytes_also_after_a_stop(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on(partial(small, wide, "whole.onnx"), tmp_path / "kept", monkeypatch)


@pytest.mark.parametrize("reducer", ["prune", "fold"])
def test_it_follows_the_dense_network_after_narrowing(wide: Path, reducer: str) -> None:
    """The fit to the dense outputs also makes up for losses of narrowing, so that four bits cost next to nothing."""
    choices: dict[str, Any] = {"ratio": 0.3, "reducer": reducer}
    slim, four = (small(wide, f"{kind}.onnx", quantize=kind, **choices)[0] for kind in ("none", "int4"))
    assert four.stat().st_size < 0.4 * slim.stat().st_size
    assert lost(four, wide) < 1.1 * lost(slim, wide) + 0.005


def test_a_search_ends_where_bits_alone_lose_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(nets.mlp((24, 256, 256, 256, 256, 10)), tmp_path / "x.onnx")
    tried = []
    loss = Candidates.loss

    def counted(self: Candidates, *words: Any, **more: Any) -> Any:
        tried.append(words)
        return loss(self, *words, **more)

    monkeypatch.setattr(Candidates, "loss", counted)
    with pytest.raises(NothingToCompressError, match="--quantize int4 alone has a loss of"):
        small(tmp_path / "x.onnx", "none.onnx", ratio=None, max_loss=0.001, minimize="params")
    assert len(tried) <= 6  # 9 if the search went on


def test_bands_of_a_spectrum_stay_positive_before_a_logarithm(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bands = np.maximum(1 - np.abs(np.arange(64)[:, None] / 3 - np.arange(24)), 0).astype(np.float32)
    weights = {"m": bands, "a": (24, 64), "b": (64, 8)}
    body = "e = Constant<value_float=1e-9>() p = Mul(x, x) f = MatMul(p, m) g = Add(f, e) l = Log(g) n = MatMul(l, a) "
    model = tiny("float[N,64] x => float[N,8] y", f"{body} r = Relu(n) y = MatMul(r, b)", weights)
    ir.save(model, tmp_path / "s.onnx")
    noise = rng.standard_normal((300, 8)) @ rng.standard_normal((8, 64))
    quiet = {"x": np.concatenate([noise, np.eye(64), np.eye(64)]).astype(np.float32)}  # noise and pure tones
    target, report = small(tmp_path / "s.onnx", "s4.onnx", data=quiet)
    assert [m["rounding"] for m in report["quantization"]["matrices"]] == ["nearest", "carried", "carried"]
    assert np.isfinite(run(target, quiet)).all()


def test_narrowed_weights_that_are_kept_in_files(tmp_path: Path) -> None:
    model = nets.mlp((24, 256, 256, 256, 256, 10))
    onnx.save_model(model, tmp_path / "x.onnx", save_as_external_data=True, location="x.data", size_threshold=1024)
    _, report = small(tmp_path / "x.onnx", "x4.onnx", ratio=0.2, samples=64)
    assert [m["rounding"] for m in report["quantization"]["matrices"]] == ["carried"] * 5


def test_half_precision(tmp_path: Path) -> None:
    onnx.save(nets.mlp((24, 96, 80, 64, 10), dtype=np.float16), tmp_path / "h.onnx")
    feed = {"x": FEED["x"].astype(np.float16)}
    found, report = small(tmp_path / "h.onnx", "h4.onnx", data=feed)
    assert len(report["quantization"]["matrices"]) == 4
    wanted, made = (run(path, feed) for path in (tmp_path / "h.onnx", found))
    assert np.square(made - wanted).sum() < 0.01 * np.square(wanted).sum()


@pytest.mark.parametrize(("name", "error"), [("w1", ModelError), ("b0", DataError)])
def test_what_is_not_finite_is_named(name: str, error: type[OnnxGrailError], tmp_path: Path) -> None:
    model = nets.mlp((24, 96, 10))
    (tensor,) = (t for t in model.graph.initializer if t.name == name)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array.flat[5] = np.nan
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "n.onnx")
    with pytest.raises(error, match=r"w0|w1"):
        small(tmp_path / "n.onnx", "n4.onnx", check=False)


def test_numbers_that_the_kernels_do_not_take(wide: Path) -> None:
    with pytest.raises(UsageError, match="power of two"):
        small(wide, "no.onnx", block_size=48)
    with pytest.raises(UsageError, match="0, 1 or 4"):
        small(wide, "no.onnx", accuracy_level=2)


def encoder(opset: int = 21) -> onnx.ModelProto:
    """Tokens, two products with a bias between them, and a head tied to the table of embeddings."""
    body = """
        e = Gather(table, ids)
        a = MatMul(e, up)
        b = Add(a, bias)
        r = Relu(b)
        d = MatMul(r, down)
        s = Add(d, e)
        t = Transpose<perm = [1, 0]>(table)
        y = MatMul(s, t)
    """
    weights = {"table": (40, 64), "up": (64, 96), "bias": (96,), "down": (96, 64)}
    return ir.to_proto(tiny("int64[N,T] ids => float[N,T,40] y", body, weights, opset=opset))


TOKENS = {"ids": np.random.default_rng(0).integers(0, 40, (64, 8))}


@pytest.mark.parametrize("qdq", [False, True])
def test_a_tied_table_has_eight_bits(tmp_path: Path, qdq: bool) -> None:
    onnx.save(encoder(), tmp_path / "t.onnx")
    found, report = small(tmp_path / "t.onnx", "t4.onnx", data=TOKENS, qdq=qdq)
    entries = {m["weight"]: m for m in report["quantization"]["matrices"]}
    assert {name: entry["bits"] for name, entry in entries.items()} == {"table": 8, "up": 4, "down": 4}
    assert report["quantization"]["left"] == []
    ops = Counter(node.op_type for node in onnx.load(found).graph.node)
    assert ops["DequantizeLinear"] == (2 if qdq else 0)
    assert ops["MatMulNBits"] == (0 if qdq else 3)
    wanted, made = (run(path, TOKENS) for path in (tmp_path / "t.onnx", found))
    assert np.square(made - wanted).sum() < 0.01 * np.square(wanted).sum()
    if qdq:
        openvino = pytest.importorskip("openvino")
        compiled = openvino.Core().compile_model(str(found), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        assert np.square(compiled(TOKENS)[0] - wanted).sum() < 0.01 * np.square(wanted).sum()


def test_standard_operators_need_their_opset(tmp_path: Path) -> None:
    onnx.save(encoder(opset=20), tmp_path / "t.onnx")
    with pytest.raises(ModelError, match="--qdq needs opset 21 for 4 bits, the model has 20") as caught:
        small(tmp_path / "t.onnx", "t4.onnx", data=TOKENS, qdq=True)
    assert "--quantize int8-weights needs less" in str(caught.value.hint)
    onnx.save(encoder(opset=12), tmp_path / "t.onnx")
    with pytest.raises(ModelError, match="--qdq needs opset 13, the model has 12") as caught:
        small(tmp_path / "t.onnx", "t8.onnx", data=TOKENS, qdq=True, quantize="int8-weights")
    assert "MatMulNBits needs no opset" in str(caught.value.hint)


@pytest.mark.parametrize(("opset", "symmetric"), [(13, False), (18, True)])
def test_older_standard_operators_have_a_scale_per_output(tmp_path: Path, opset: int, symmetric: bool) -> None:
    model = encoder(opset=opset)
    model.ir_version = 8
    onnx.save(model, tmp_path / "t.onnx")
    choices: dict[str, Any] = {"data": TOKENS, "qdq": True, "quantize": "int8-weights", "symmetric": symmetric}
    found, report = small(tmp_path / "t.onnx", "t8.onnx", **choices)
    assert {m["weight"]: m["block_size"] for m in report["quantization"]["matrices"]} == {
        "table": 64, "up": 64, "down": 96
    }  # fmt: skip
    assert any(f"opset {opset} has no blocks" in note for note in report["notes"])
    (proto, ops) = onnx.load(found), Counter(node.op_type for node in onnx.load(found).graph.node)
    assert ops["DequantizeLinear"] == 2
    assert proto.opset_import[0].version == opset
    assert proto.ir_version == 8  # older runtimes refuse a later one
    onnx.checker.check_model(proto, full_check=True)
    wanted, made = (run(path, TOKENS) for path in (tmp_path / "t.onnx", found))
    assert np.square(made - wanted).sum() < 1e-4 * np.square(wanted).sum()


def test_inputs_that_do_not_divide_into_blocks(tmp_path: Path) -> None:
    """`MatMulNBits` pads the last block; other runtimes refuse a `DequantizeLinear` whose last block is shorter."""
    widths = (24, 80, 72, 10)
    model = nets.mlp(widths)
    model.opset_import[0].version = 21
    onnx.save(model, tmp_path / "m.onnx")
    _, padded = small(tmp_path / "m.onnx", "p.onnx", dry_run=True)
    _, report = small(tmp_path / "m.onnx", "q.onnx", qdq=True, dry_run=True)
    assert [m["block_size"] for m in padded["quantization"]["matrices"]] == [32, 32, 32]
    assert [m["block_size"] for m in report["quantization"]["matrices"]] == [16]
    reasons = {left["reason"] for left in report["quantization"]["left"]}
    assert reasons == {f"its {n} inputs do not divide into blocks of 16" for n in (24, 72)}


def test_blocks_are_no_larger_than_padding_is_worth(wide: Path) -> None:
    _, report = small(wide, "b.onnx", block_size=128, dry_run=True)
    assert [m["block_size"] for m in report["quantization"]["matrices"]] == [32, 128, 128, 64]


def test_a_small_last_layer_has_eight_bits(tmp_path: Path) -> None:
    onnx.save(nets.mlp((24, 256, 128, 4)), tmp_path / "h.onnx")
    onnx.save(nets.mlp((24, 64, 32)), tmp_path / "l.onnx")
    _, small_head = small(tmp_path / "h.onnx", "h4.onnx", dry_run=True, samples=32)
    _, large_head = small(tmp_path / "l.onnx", "l4.onnx", dry_run=True, samples=32)
    assert [m["bits"] for m in small_head["quantization"]["matrices"]] == [4, 4, 8]
    assert [m["bits"] for m in large_head["quantization"]["matrices"]] == [4, 4]


def test_matrices_inside_bodies_have_eight_bits(tmp_path: Path) -> None:
    body = """
        a = MatMul(x, w)
        y = If(flag) <
            then_branch = t () => (float[N,64] p) { p = MatMul(a, v) },
            else_branch = e () => (float[N,64] q) { q = MatMul(a, u) }
        >
    """
    weights = {"w": (64, 64), "u": (64, 64), "v": (64, 64)}
    model = tiny("float[N,64] x, bool flag => float[N,64] y", body, weights)
    onnx.save(ir.to_proto(model), tmp_path / "i.onnx")
    data = {"x": np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32), "flag": np.array(True)}
    _, report = small(tmp_path / "i.onnx", "i4.onnx", data=data, batch_size=16)
    assert {m["weight"]: m["bits"] for m in report["quantization"]["matrices"]} == {"w": 4, "v": 8, "u": 8}
    assert not report["quantization"]["left"]
    chosen = onnxgrail.compress(tmp_path / "i.onnx", data=data, batch_size=16, target_size="90%", held_out=0)
    assert any("67% of the bytes are weights in branches and loops" in note for note in chosen.report.data["notes"])


def test_a_model_of_convolutions_is_sent_to_the_other_kind(tmp_path: Path) -> None:
    weights = {"w": (80, 3, 9, 9), "v": (5, 80, 1, 1)}
    model = tiny("float[N,3,10,10] x => float[N,5,2,2] y", "a = Conv(x, w)\nb = Relu(a)\ny = Conv(b, v)", weights)
    onnx.save(ir.to_proto(model), tmp_path / "c.onnx")
    with pytest.raises(NothingToCompressError) as caught:
        onnxgrail.compress(
            tmp_path / "c.onnx", tmp_path / "o.onnx", check=False, **{**WHOLE, "quantize": "int8-dynamic"}
        )
    assert "--quantize int8-dynamic leaves convolutions in float; --quantize int8 has them" in str(caught.value.hint)
