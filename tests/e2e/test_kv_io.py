"""Models with a key-value cache: `--kv-io` narrows inputs and outputs, and whatever runs the result is fed alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.cli import main
from tests.tiny import ints, lines, tiny

HEADS, SIZE, WIDTH, HIDDEN, TOKENS, PAST, BATCH = 4, 4, 16, 24, 3, 5, 6
LAYER = """
    q$i = MatMul(x$i, wq$i)
    k$i = MatMul(x$i, wk$i)
    v$i = MatMul(x$i, wv$i)
    qr$i = Reshape(q$i, into)
    kr$i = Reshape(k$i, into)
    vr$i = Reshape(v$i, into)
    qt$i = Transpose<perm=[0,2,1,3]>(qr$i)
    kt$i = Transpose<perm=[0,2,1,3]>(kr$i)
    vt$i = Transpose<perm=[0,2,1,3]>(vr$i)
    present_k$i = Concat<axis=-2>(tk$i, kt$i)
    present_v$i = Concat<axis=-2>(past_v$i, vt$i)
    kk$i = Transpose<perm=[0,1,3,2]>(present_k$i)
    s$i = MatMul(qt$i, kk$i)
    a$i = Softmax<axis=-1>(s$i)
    o$i = MatMul(a$i, present_v$i)
    ot$i = Transpose<perm=[0,2,1,3]>(o$i)
    oj$i = Reshape(ot$i, back)
    h$i = MatMul(oj$i, wo$i)
    r$i = Add(h$i, x$i)
    u$i = MatMul(r$i, up$i)
    g$i = Gelu(u$i)
    d$i = MatMul(g$i, down$i)
    x$j = Add(d$i, r$i)
"""


def decoder(layers: int = 2) -> ir.Model:
    """Decoder layers; cached keys come as (batch, tokens, heads, size) and are all turned in front of the first."""
    early = "".join(lines("tk$i = Transpose<perm=[0,2,1,3]>(past_k$i)\n", i=i) for i in range(layers))
    body = early + "".join(lines(LAYER, i=i, j=i + 1) for i in range(layers)) + f"y = Identity(x{layers})"
    weights: dict[str, Any] = {"into": ints(0, 0, HEADS, SIZE), "back": ints(0, 0, -1)}
    for i in range(layers):
        weights |= {f"w{p}{i}": (WIDTH, HEADS * SIZE) for p in "qkv"} | {f"wo{i}": (HEADS * SIZE, WIDTH)}
        weights |= {f"up{i}": (WIDTH, HIDDEN), f"down{i}": (HIDDEN, WIDTH)}
    pasts = ", ".join(
        f"float[N,P,{HEADS},{SIZE}] past_k{i}, float[N,{HEADS},P,{SIZE}] past_v{i}" for i in range(layers)
    )
    presents = ", ".join(f"float[] present_k{i}, float[] present_v{i}" for i in range(layers))
    return tiny(f"float[N,S,{WIDTH}] x0, {pasts} => float[] y, {presents}", body, weights)


def feeds(layers: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of full width."""
    rng = np.random.default_rng(7)
    found = {"x0": rng.normal(size=(BATCH, TOKENS, WIDTH))}
    for i in range(layers):
        found[f"past_k{i}"] = rng.normal(size=(BATCH, PAST, HEADS, SIZE))
        found[f"past_v{i}"] = rng.normal(size=(BATCH, HEADS, PAST, SIZE))
    return {name: array.astype(np.float32) for name, array in found.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model and its data."""
    folder = tmp_path_factory.mktemp("cache")
    ir.save(decoder(), folder / "m.onnx")
    np.savez(folder / "d.npz", **feeds())
    return folder / "m.onnx", folder / "d.npz"


def interface(data: Any) -> dict[str, tuple[int, int, int]]:
    return {p["name"]: (p["axis"], p["before"], p["after"]) for p in data["interface"]}


HEADS_ONLY: dict[str, Any] = {"blocks": ("mlp", "heads")}
WHOLE = {"past_k0": 2, "past_v0": 1, "past_k1": 2, "past_v1": 1}
MADE = {"present_k0": 1, "present_v0": 1, "present_k1": 1, "present_v1": 1}


@pytest.mark.parametrize(
    "choices",
    [{}, {"closed_loop": False}, {"reducer": "fold"}, {"compensate": "none"}, {"selector": "l2", "unit_ratio": 0.25}],
)
def test_caches_are_narrowed(files: tuple[Path, Path], tmp_path: Path, choices: dict[str, Any]) -> None:
    model, data = files
    words = {"unit_ratio": 0.5, "round_to": 1, **choices}
    result = onnxgrail.compress(model, tmp_path / "o.onnx", data=str(data), kv_io=True, **HEADS_ONLY, **words)
    report = result.report.data
    heads = [b for b in report["blocks"] if b["kind"] == "heads"]
    left = HEADS - int(HEADS * words["unit_ratio"])
    assert [(b["units"], b["kept"]) for b in heads] == [(HEADS, left)] * 2
    assert interface(report) == {n: (axis, HEADS, left) for n, axis in (WHOLE | MADE).items()}
    kept = {p["name"]: p["kept"] for p in report["interface"]}
    assert kept["past_k0"] == kept["present_v0"] == heads[0]["kept_units"]
    session = ort.InferenceSession(tmp_path / "o.onnx")
    narrow = {n: np.take(a, kept[n], axis=WHOLE[n]) if n in WHOLE else a for n, a in feeds().items()}
    out = dict(zip([o.name for o in session.get_outputs()], session.run(None, narrow), strict=True))
    assert out["present_k1"].shape == (BATCH, left, PAST + TOKENS, SIZE)
    declared = {v.name: list(v.shape) for v in session.get_inputs()}
    assert declared["past_k0"][2] == declared["past_v1"][1] == left


def test_kept_heads_are_compared_with_those_they_were(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Keys of the first layer depend on nothing that was narrowed, so they must agree to the last digit or so."""
    model, data = files
    result = onnxgrail.compress(model, tmp_path / "o.onnx", data=str(data), kv_io=True, unit_ratio=0.5, round_to=1)
    for checks in (
        result.report.data["verification"]["outputs"],
        onnxgrail.compare(model, tmp_path / "o.onnx", data=str(data)).to_data()["outputs"],
    ):
        errors = {o["name"]: o["nmse"] for o in checks}
        assert errors["present_k0"] < 1e-10
        assert errors["present_v0"] < 1e-10
        assert errors["y"] > 1e-6


def test_layers_may_keep_different_heads(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    blocks = onnxgrail.inspect(model, kv_io=True).blocks
    second = next(b["name"] for b in blocks if b["kind"] == "heads" and "wq1" in b["producers"])
    words = {"data": str(data), "kv_io": True, "unit_ratio": 0.5, "round_to": 1, **HEADS_ONLY}
    words["exclude"] = f"^{re.escape(second)}$"
    result = onnxgrail.compress(model, tmp_path / "o.onnx", **words)
    assert interface(result.report.data) == {
        n: (axis, HEADS, 2) for n, axis in (WHOLE | MADE).items() if n.endswith("0")
    }
    declared = {v.name: list(v.shape) for v in ort.InferenceSession(tmp_path / "o.onnx").get_inputs()}
    assert (declared["past_v0"][1], declared["past_v1"][1]) == (2, HEADS)


def test_narrowed_twice(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The note in the file counts in the positions of the first original."""
    model, data = files
    once, twice = tmp_path / "once.onnx", tmp_path / "twice.onnx"
    words: dict[str, Any] = {"kv_io": True, "round_to": 1, **HEADS_ONLY}
    first = onnxgrail.compress(model, once, data=str(data), unit_ratio=0.25, **words)
    kept = {p["name"]: p["kept"] for p in first.report.data["interface"]}
    narrow = {n: np.take(a, kept[n], axis=WHOLE[n]) if n in WHOLE else a for n, a in feeds().items()}
    onnxgrail.compress(once, twice, data=narrow, unit_ratio=0.34, **words)
    note = json.loads({p.key: p.value for p in onnx.load(twice).metadata_props}["onnxgrail.interface"])
    assert {p["name"]: (p["before"], p["after"]) for p in note} == dict.fromkeys(WHOLE | MADE, (HEADS, 2))
    assert all(set(p["kept"]) <= set(kept[p["name"]]) for p in note)
    for wide, fed in ((model, feeds()), (once, narrow)):
        errors = {o.name: o.nmse for o in onnxgrail.compare(wide, twice, data=fed).outputs}
        assert errors["present_k0"] is not None
        assert errors["present_k0"] < 1e-10


def test_caches_stay_without_leave(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    result = onnxgrail.compress(model, tmp_path / "o.onnx", data=str(data), unit_ratio=0.5)
    report = result.report.data
    assert {b["kind"] for b in report["blocks"] if b["kept"] < b["units"]} == {"mlp"}
    assert report["interface"] == []
    assert any("--kv-io" in r["reason"] for r in report["refusals"])
    assert "onnxgrail.interface" not in {p.key for p in onnx.load(tmp_path / "o.onnx").metadata_props}


def test_the_change_is_printed(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    words = [
        "compress",
        str(model),
        str(tmp_path / "o.onnx"),
        "--data",
        str(data),
        "--unit-ratio",
        "0.5",
        "--round-to",
        "1",
    ]
    result = CliRunner().invoke(main, [*words, "--kv-io", "--blocks", "mlp,heads"])
    assert result.exit_code == 0, result.output
    assert "Interface: past_k0, past_k1: 4 -> 2 (axis 2)" in result.output
    assert "Interface: past_v0, past_v1 and 4 more: 4 -> 2 (axis 1)" in result.output
    assert "genai_config.json" in result.output
    quiet = CliRunner().invoke(main, [*words, "--force"])
    assert "Interface" not in quiet.output
    assert "genai_config.json" not in quiet.output
    inner = CliRunner().invoke(main, [*words, "--kv-io", "--force"])
    assert "Interface: past_k0, present_k0 and 6 more: 4 -> 2 (axis 3, in a basis of its own)" in inner.output
    assert "genai_config.json" in inner.output


def test_inspect_shows_what_leave_would_bring(files: tuple[Path, Path]) -> None:
    model, _ = files
    for words, kinds in (([], {"mlp"}), (["--kv-io"], {"mlp", "heads", "qk", "vo"})):
        result = CliRunner().invoke(main, ["inspect", str(model), "--json", *words])
        assert result.exit_code == 0, result.output
        assert {b["kind"] for b in json.loads(result.output)["blocks"]} - {"stream"} == kinds
