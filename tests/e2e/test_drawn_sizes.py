"""Models that say nothing of the sizes they need: others than the usual ones are tried, and errors name the option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import tiny


def positions(rows: int) -> bytes:
    """A table of positions that the graph itself counts."""
    body = """
        one = Constant <value_int = 1> ()
        zero = Constant <value_int = 0> ()
        s = Shape(ids)
        n = Gather(s, one)
        r = Range(zero, n, one)
        p = Gather(pos, r)
        e = Gather(emb, ids)
        x = Add(e, p)
        a = MatMul(x, w)
        b = Relu(a)
        y = MatMul(b, v)
    """
    weights = {"pos": (rows, 8), "emb": (50, 8), "w": (8, 32), "v": (32, 8)}
    return to_bytes(tiny("int64[N,S] ids => float[N,S,8] y", body, weights, opset=17))


def recording() -> bytes:
    """Convolutions that make one step of 400 samples, as those of wav2vec 2.0."""
    body = """
        axis = Constant <value_ints = [1]> ()
        x = Unsqueeze(sound, axis)
        a = Conv <strides = [320]> (x, w)
        b = Relu(a)
        y = Conv(b, v)
    """
    return to_bytes(tiny("float[N,T] sound => float[N,4,S] y", body, {"w": (32, 1, 400), "v": (4, 32, 1)}, opset=17))


def image() -> bytes:
    """Patches of 32 x 32 pixels and one position for each of 7 x 7."""
    body = """
        a = Conv <strides = [32, 32]> (x, w)
        b = Relu(a)
        c = Conv(b, v)
        y = Add(c, pos)
    """
    weights = {"w": (16, 3, 32, 32), "v": (4, 16, 1, 1), "pos": (1, 4, 7, 7)}
    return to_bytes(tiny("float[N,3,H,W] x => float[N,4,7,7] y", body, weights, opset=17))


def fresh() -> bytes:
    """A cache in front of what is added to as many positions: only an empty one will do."""
    body = """
        c = Concat <axis = 1> (cache_past, x)
        d = Add(c, x)
        a = MatMul(d, w)
        b = Relu(a)
        y = MatMul(b, v)
    """
    given = "float[N,S,8] x, float[N,past,8] cache_past"
    return to_bytes(tiny(f"{given} => float[N,S,8] y", body, {"w": (8, 32), "v": (32, 8)}, opset=17, recorded=False))


def exact() -> bytes:
    """A mix of 37 rows: nobody would guess that."""
    weights = {"pos": (4, 37), "w": (8, 32), "v": (32, 8)}
    body = """
        d = MatMul(pos, x)
        a = MatMul(d, w)
        b = Relu(a)
        y = MatMul(b, v)
    """
    return to_bytes(tiny("float[N,S,8] x => float[N,4,8] y", body, weights, opset=17, recorded=False))


def llama_cache() -> bytes:
    """A mask as long as what is cached and what is fed, in axes whose names say nothing."""
    body = """
        last = Constant <value_ints = [2]> ()
        c = Concat <axis = 1> (past_key, x)
        m = Unsqueeze(attention_mask, last)
        f = Cast <to = 1> (m)
        d = Mul(c, f)
        a = MatMul(d, w)
        b = Relu(a)
        y = MatMul(b, v)
    """
    given = "float[s0,s1,8] x, int64[s0,s2] attention_mask, float[s0,s3,8] past_key"
    weights = {"w": (8, 32), "v": (32, 8)}
    return to_bytes(tiny(f"{given} => float[N,S,8] y", body, weights, opset=17, recorded=False))


def apart() -> bytes:
    """Words, segments and a mask of one length, whose axes have different names."""
    body = """
        last = Constant <value_ints = [2]> ()
        e = Gather(emb, ids)
        g = Gather(kinds, segments)
        x = Add(e, g)
        m = Unsqueeze(mask, last)
        d = Mul(x, m)
        a = MatMul(d, w)
        b = Relu(a)
        y = MatMul(b, v)
    """
    given = "int64[unk0,unk1] ids, int64[unk2,unk3] segments, float[unk4,unk5] mask"
    weights = {"emb": (50, 8), "kinds": (50, 8), "w": (8, 32), "v": (32, 8)}
    return to_bytes(tiny(f"{given} => float[N,S,8] y", body, weights, opset=17, recorded=False))


def stream() -> bytes:
    """A state of two layers with a batch of its own, and a sampling rate that is a scalar."""
    body = """
        one = Constant <value_ints = [0]> ()
        h = ReduceMean <keepdims = 0> (state, one)
        d = Add(x, h)
        a = MatMul(d, w)
        b = Relu(a)
        e = MatMul(b, v)
        rate = Constant <value_int = 16000> ()
        known = Div(rate, sr)
        r = Cast <to = 1> (known)
        y = Mul(e, r)
    """
    given = "float[N,8] x, float[2,M,8] state, int64 sr"
    return to_bytes(tiny(f"{given} => float[N,8] y", body, {"w": (8, 32), "v": (32, 8)}, opset=18, recorded=False))


@pytest.mark.parametrize(
    ("model", "drawn"),
    [
        (positions(12), "ids[8, 8]"),
        (positions(5), "ids[8, 4]"),
        (recording(), "sound[8, 1024]"),
        (image(), "x[8, 3, 224, 224]"),
        (fresh(), "x[8, 16, 8], cache_past[8, 0, 8]"),
        (llama_cache(), "x[8, 16, 8], attention_mask[8, 21], past_key[8, 5, 8]"),
        (apart(), "ids[8, 16], segments[8, 16], mask[8, 16]"),
        (stream(), "x[2, 8], state[2, 2, 8], sr[]"),
    ],
    ids=["twelve positions", "five positions", "recording", "image", "empty cache", "mask", "names", "state"],
)
def test_other_sizes_are_tried(model: bytes, drawn: str) -> None:
    result = onnxgrail.compress(model, unit_ratio=0.5, samples=16)
    calibration: dict[str, Any] = result.report.data["calibration"]
    assert calibration["synthetic"]
    assert calibration["notes"][-1].endswith(f"used instead: {drawn}")
    assert result.report.data["model"]["params_after"] < result.report.data["model"]["params_before"]


def test_where_the_usual_sizes_run_nothing_is_said() -> None:
    notes = onnxgrail.compress(positions(16), unit_ratio=0.5, samples=16).report.data["calibration"]["notes"]
    assert not [note for note in notes if "drawn instead" in note]


@pytest.mark.parametrize("choices", [{}, {"input_shapes": {"x": (8, 7, 8)}}], ids=["drawn", "asked"])
def test_where_none_will_do_the_option_is_named(choices: dict[str, Any]) -> None:
    length, tried = (7, "") if choices else (16, r"\. Tried: x\[2, 16, 8\]; .*x\[1, 16, 8\].*")
    with pytest.raises(ModelError, match=rf"x\[8, {length}, 8\].*these are --input-shapes x:8,{length},8{tried}$"):
        onnxgrail.compress(exact(), unit_ratio=0.5, **choices)


def test_shapes_that_are_given_are_kept() -> None:
    result = onnxgrail.compress(positions(12), unit_ratio=0.5, samples=16, input_shapes={"ids": (8, 11)})
    assert not [note for note in result.report.data["calibration"]["notes"] if "drawn instead" in note]
    assert np.isfinite(result.report.data["verification"]["outputs"][0]["cosine"])
