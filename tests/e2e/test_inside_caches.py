"""Runs with `--kv-io` that narrow channels inside heads: caches are narrower, in a basis of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.graph.cost.counting import parameters
from onnxgrail.graph.rewrite.interface import NOTE, between, fit, noted
from tests.e2e.test_kv_io import HEADS, MADE, PAST, SIZE, TOKENS, WHOLE, decoder, feeds
from tests.oracle import check_same, run
from tests.tiny import feed
from tests.unit.test_inside_caches import NETS, cached, picks

INNER = ("qk", "vo")
CACHES = WHOLE.keys() | MADE.keys()
CHOICES: dict[str, Any] = {"kv_io": True, "round_to": 1, "blocks": INNER}


def interface(result: Any) -> dict[str, tuple[int, int, int]]:
    return {p["name"]: (p["axis"], p["before"], p["after"]) for p in result.report.data["interface"]}


def errors(outputs: Any) -> dict[str, float]:
    return {o["name"]: o["nmse"] for o in outputs}


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """The result of a run, its file, and the file that it began with."""
    folder = tmp_path_factory.mktemp("inside")
    ir.save(decoder(), folder / "m.onnx")
    result = onnxgrail.compress(folder / "m.onnx", folder / "o.onnx", data=feeds(), unit_ratio=0.5, **CHOICES)
    return result, folder / "o.onnx", folder / "m.onnx"


def test_caches_lose_channels_and_keep_heads(halved: tuple[Any, Path, Path]) -> None:
    result, written, _ = halved
    assert interface(result) == dict.fromkeys(CACHES, (3, SIZE, SIZE // 2))
    assert all(port["own_basis"] for port in result.report.data["interface"])
    model = ir.load(written)
    assert len([*model.graph]) == len([*decoder().graph])
    shapes = {v.name: v.shape[3] for v in (*model.graph.inputs, *model.graph.outputs) if v.name in CACHES}
    assert shapes == dict.fromkeys(CACHES, SIZE // 2)
    given = fit(feeds(), between(decoder(), model))
    assert given["past_k0"].shape == (len(given["x0"]), PAST, HEADS, SIZE // 2)
    assert run(model, given)["present_k0"].shape == (len(given["x0"]), HEADS, PAST + TOKENS, SIZE // 2)


def test_the_basis_of_a_past_and_a_present_is_stored_once(halved: tuple[Any, Path, Path]) -> None:
    entries = json.loads(ir.load(halved[1]).metadata_props[NOTE])
    assert [type(entry["basis"]) for entry in entries] == [str, int] * 4
    assert [entry["basis"] for entry in entries[1::2]] == [0, 2, 4, 6]


def test_steps_with_its_own_caches_are_one_pass(halved: tuple[Any, Path, Path]) -> None:
    model = ir.load(halved[1])
    x = feeds()["x0"]
    empty = {n: np.zeros((len(x), 0, HEADS, 2) if n[5] == "k" else (len(x), HEADS, 0, 2), np.float32) for n in WHOLE}
    first = run(model, {"x0": x, **empty})
    again: dict[str, Array] = {n: first[n.replace("past", "present")] for n in WHOLE}
    again |= {n: a.swapaxes(1, 2) for n, a in again.items() if n[5] == "k"}
    second = run(model, {"x0": x[:, :1], **again})
    both = run(model, {"x0": np.concatenate([x, x[:, :1]], axis=1), **empty})
    first_layer = ("present_k0", "present_v0")  # there is no mask, so earlier tokens see later ones in one pass
    check_same({n: second[n] for n in first_layer}, {n: both[n] for n in first_layer})


def test_narrower_caches_are_compared_with_those_they_were(halved: tuple[Any, Path, Path]) -> None:
    """Keys and values of the first layer depend on nothing else that was narrowed."""
    result, written, first = halved
    compared = onnxgrail.compare(first, written, data=feeds()).to_data()["outputs"]
    for found in (errors(result.report.data["verification"]["outputs"]), errors(compared)):
        assert found["present_k0"] < 1e-10
        assert found["present_v0"] < 1e-10
        assert 1e-6 < found["y"] < 1


def test_narrowed_twice(halved: tuple[Any, Path, Path], tmp_path: Path) -> None:
    """Channels go first, then heads: the note tells how the first original's caches become the last one's."""
    _, once, first = halved
    wide, twice = ir.load(first), tmp_path / "twice.onnx"
    narrow = fit(feeds(), between(wide, ir.load(once)))
    words = {"kv_io": True, "round_to": 1, "unit_ratio": 0.5, "blocks": ("heads",)}
    onnxgrail.compress(once, twice, data=narrow, **words)
    last = tmp_path / "last.onnx"
    onnxgrail.compress(twice, last, data=fit(narrow, between(ir.load(once), ir.load(twice))), unit_ratio=0.5, **CHOICES)
    for model, given in ((first, feeds()), (once, narrow)):
        assert errors(onnxgrail.compare(model, twice, data=given).to_data()["outputs"])["present_k0"] < 1e-10
        assert errors(onnxgrail.compare(model, last, data=given).to_data()["outputs"])["present_v0"] < 1e-10
    assert {(p.name, p.axis): (p.before, p.after) for p in noted(ir.load(last))} == {
        **dict.fromkeys((WHOLE | MADE).items(), (HEADS, 2)),
        **dict.fromkeys([(name, 3) for name in CACHES], (SIZE, 1)),
    }


def test_a_run_is_repeated_to_the_same_bytes(halved: tuple[Any, Path, Path], tmp_path: Path) -> None:
    _, written, first = halved
    onnxgrail.apply(written, first, tmp_path / "again.onnx", data=feeds())
    assert (tmp_path / "again.onnx").read_bytes() == written.read_bytes()


@pytest.mark.parametrize(
    "choices",
    [{"target_params": "70%"}, {"target_macs": "70%"}, {"ratio": 0.3}, {"ratio": 0.3, "closed_loop": False}],
)
def test_matrices_between_do_not_count(choices: dict[str, Any]) -> None:
    result = onnxgrail.compress(decoder(), data=feeds(), kv_io=True, round_to=1, **choices)
    data = result.report.data["model"]
    stored = parameters(decoder())
    assert (data["params_before"], data["params_after"]) == (stored, parameters(result.model))
    compared = onnxgrail.compare(decoder(), result.model, data=feeds()).to_data()
    assert (data["macs_before"], data["macs_after"]) == (compared["a"]["macs"], compared["b"]["macs"])
    assert 0.6 * stored < data["params_after"] <= 0.71 * stored
    assert {b["kind"] for b in result.report.data["blocks"]} >= {*INNER}
    told = [name for block in result.report.data["blocks"] for name in [m["initializer"] for m in block["members"]]]
    assert not [name for name in told if "past" in name or "present" in name]


def test_a_run_with_empty_caches_tells_what_to_give() -> None:
    data = feeds()
    shapes = {n: tuple(0 if size == PAST else size for size in data[n].shape) for n in WHOLE}
    data |= {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
    notes = onnxgrail.compress(decoder(), data=[data], kv_io=True, unit_ratio=0.5, round_to=1).report.data["notes"]
    assert any(note.startswith("--kv-io needs --data with caches that are not empty") for note in notes)
    with pytest.raises(onnxgrail.errors.NothingToCompressError, match="--kv-io needs --data with caches"):
        onnxgrail.compress(decoder(), data=[data], blocks=INNER, kv_io=True, unit_ratio=0.5)


def test_empty_caches_tell_nothing_of_their_channels() -> None:
    given = {n: a[:, :0] if n[5:6] == "k" else a[:, :, :0] if n in WHOLE else a for n, a in feeds().items()}
    result = onnxgrail.compress(decoder(), data=given, unit_ratio=0.5, kv_io=True)
    assert interface(result) == {}
    assert not {b["kind"] for b in result.report.data["blocks"]} & {*INNER}


@pytest.mark.parametrize("name", NETS)
def test_every_form_is_narrowed_by_default(name: str) -> None:
    model = cached(name)
    rows = {n: np.concatenate([a] * 8) for n, a in feed(model).items()}
    result = onnxgrail.compress(model, data=rows, ratio=0.3, kv_io=True, round_to=1)
    kept = {b["kind"]: b["kept"] < b["units"] for b in result.report.data["blocks"] if b["kind"] in INNER}
    assert kept.keys() == {*INNER}
    assert any(kept.values())
    found = errors(result.report.data["verification"]["outputs"])
    assert found["present_v"] < 1e-10
    assert "normalized" in name or found["present_k"] < 1e-10  # the mean of squares lacks channels
    bases = {p["name"][-1]: p["own_basis"] for p in result.report.data["interface"]}
    assert bases.get("v", True)
    assert not (picks(name) and bases.get("k"))


def test_a_note_that_is_no_note_is_passed_over() -> None:
    model = decoder()
    port = {"name": "past_k0", "axis": 3, "before": 1, "after": 1, "kept": [0], "heads": [1, 1], "basis": "AACAPw=="}
    for change, count in (
        ({}, 1),
        ({"basis": "AAAA"}, 0),
        ({"basis": "AADAfw=="}, 0),
        ({"heads": [1, 2]}, 0),
        ({"heads": [3, 1]}, 0),
    ):
        model.metadata_props[NOTE] = json.dumps([{**port, **change}])
        assert len(noted(model)) == count
    model.metadata_props[NOTE] = json.dumps([[port]])
    assert noted(model) == ()
