"""`--keep-tokens`: rows of embedding tables that no token looks up go, and inputs and outputs stay as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxgrail
from onnxgrail.calibration.feeds.kept import ids_of
from onnxgrail.core import Array
from onnxgrail.errors import DataError, UsageError
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.rewrite.rows import Trimmed, trim
from tests.command import run as called
from tests.oracle import run
from tests.tiny import ints, tiny

ROWS, WIDTH, HIDDEN = 40, 6, 120
IDS = "int64[N,S] ids => float[] y"
LAYERS = "u = MatMul(x, up)\nr = Relu(u)\ny = MatMul(r, down)"
WEIGHTS = {"table": (ROWS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
KEPT = [7, 3, 12, 30, 31]

PLAIN = tiny(IDS, f"x = Gather(table, ids)\n{LAYERS}", WEIGHTS)
MOVED = """
    a = Cast<to=6>(ids)
    b = Unsqueeze(a, last)
    c = Transpose<perm=[1,0,2]>(b)
    d = Squeeze(c, last)
    e = Gather(table, d)
    f = Cast<to=1>(e)
    g = Transpose<perm=[1,0,2]>(f)
    i = Gather(other, ids)
    y = Concat<axis=-1>(g, i)"""
HALF = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float16)
LOOKUPS = {
    "plain": PLAIN,
    "half precision, two tables": tiny(IDS, MOVED, {"table": HALF, "other": (ROWS, 3), "last": ints(-1)}),
    "two inputs": tiny(
        "int64[N,S] ids, int32[N,S] more => float[] y",
        "a = Gather(table, ids)\nb = Gather(table, more)\nc = Gather(table, ids)\nd = Mul(a, b)\ny = Add(c, d)",
        {"table": (ROWS, WIDTH)},
    ),
}
HEADS = {
    "transposed": ("t = Transpose<perm=[1,0]>(table)\ny = MatMul(x, t)", 20),
    "a bias after it": ("t = Transpose<perm=[1,0]>(table)\nz = MatMul(x, t)\ny = Add(z, bias)", 20),
    "axes as attribute": ("t = Transpose<perm=[1,0]>(table)\ny = MatMul(x, t)", 17),
    "rows": ("f = Reshape(x, flat)\ny = Gemm<transB=1>(f, table)", 20),
}


def tied(end: str, opset: int = 20, signature: str = IDS) -> ir.Model:
    more = {"bias": (ROWS,), "flat": ints(-1, WIDTH)}
    weights = {"table": (ROWS, WIDTH)} | {name: more[name] for name in more if name in end}
    return tiny(signature, f"x = Gather(table, ids)\n{end}", weights, opset=opset)


def feed_of(model: ir.Model, values: Any, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {str(i.name): rng.choice(values, (3, 5)).astype(i.dtype.numpy()) for i in model.graph.inputs if i.dtype}


def trimmed(model: ir.Model, ids: list[int], inputs: tuple[str, ...] = ("ids", "more")) -> ir.Model:
    small = copy(model)
    assert trim(small, ids, inputs, tied=True)[0]
    onnx.checker.check_model(ir.to_proto(small), full_check=True)
    return small


@pytest.fixture
def place(tmp_path: Path) -> Path:
    ir.save(PLAIN, tmp_path / "m.onnx")
    (tmp_path / "keep.txt").write_text("\n".join(map(str, KEPT)))
    np.savez(tmp_path / "d.npz", ids=np.random.default_rng(0).choice(KEPT, (64, 5)))
    return tmp_path


def compressed(place: Path, **choices: Any) -> Any:
    return onnxgrail.compress(place / "m.onnx", place / "o.onnx", keep_tokens=place / "keep.txt", force=True, **choices)


@pytest.mark.parametrize("form", LOOKUPS)
@settings(max_examples=20, deadline=None)
@given(ids=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS - 1))
def test_kept_ids_give_the_same_numbers_and_others_those_of_the_first(form: str, ids: list[int]) -> None:
    model = LOOKUPS[form]
    if len(set(ids)) == ROWS:
        return
    small = trimmed(model, ids)
    feed = feed_of(model, ids)
    np.testing.assert_array_equal(run(small, feed)["y"], run(model, feed)["y"])
    gone = feed_of(model, [number for number in range(ROWS) if number not in ids])
    first = {name: np.full_like(array, ids[0]) for name, array in gone.items()}
    np.testing.assert_array_equal(run(small, gone)["y"], run(model, first)["y"])


def test_lookups_of_the_same_ids_share_a_map() -> None:
    small = trimmed(LOOKUPS["two inputs"], KEPT)
    maps = [node for node in small.graph if node.op_type == "Gather" and node.inputs[0].dtype == ir.DataType.INT32]
    assert len({node.inputs[0] for node in maps}) == 1
    assert [node.inputs[1].name for node in sorted(maps, key=lambda node: str(node.inputs[1].name))] == ["ids", "more"]


@pytest.mark.parametrize("form", HEADS)
def test_a_tied_head_gives_kept_ids_their_values_and_others_the_lowest(form: str) -> None:
    model = tied(*HEADS[form])
    feed = feed_of(model, KEPT)
    got, want = run(trimmed(model, KEPT), feed)["y"], run(model, feed)["y"]
    assert got.shape == want.shape
    np.testing.assert_allclose(got[..., KEPT], want[..., KEPT], rtol=1e-5, atol=1e-6)
    bias = (
        model.graph.initializers["bias"].const_value.numpy() if "bias" in model.graph.initializers else np.zeros(ROWS)
    )
    lowest = (got - bias)[..., KEPT].min(-1, keepdims=True)
    gone = np.delete(got - bias, KEPT, -1)
    np.testing.assert_allclose(gone, np.broadcast_to(lowest, gone.shape), rtol=1e-5, atol=1e-6)


READERS = {
    "": ("x = Gather(table, ids)\nm = MatMul(x, other)\ny = Mul(x, m)", {"other": (WIDTH, WIDTH)}),
    "ReduceSum reads it": ("x = Gather(table, ids)\ns = ReduceSum(table)\ny = Mul(x, s)", {}),
    "Cast reads it": ("c = Cast<to=10>(table)\nx = Gather(c, ids)\ny = Cast<to=1>(x)", {}),
    "Unsqueeze reads it": ("f = Unsqueeze(table, last)\nx = Gather(f, ids)\ny = Relu(x)", {"last": ints(-1)}),
    "ids that are no input's are looked up in it too": (
        "x = Gather(table, ids)\nz = Gather(table, one)\ny = Mul(x, z)",
        {"one": ints(1)},
    ),
    "it is no matrix of floats that only nodes of the main graph read": (
        "x = Gather(table, ids)\ny = Relu(x)",
        {"table": (ROWS, 2, 3)},
    ),
    "it has 9 rows, and id 31 is kept": ("x = Gather(table, ids)\ny = Relu(x)", {"table": (9, 3)}),
    "it is the head of the model, too, with a bias in the same node": (
        "x = Gather(table, ids)\nf = Reshape(x, flat)\ny = Gemm<transB=1>(f, table, bias)",
        {"bias": (ROWS,), "flat": ints(-1, WIDTH)},
    ),
}
BRANCHES = """
    c = Greater(ids, one)
    x = If(c) <then_branch = t () => (a) { a = Gather(table, ids) }, else_branch = e () => (b) { b = Neg(one) }>
    z = Gather(table, ids)
    y = Identity(z)"""


@pytest.mark.parametrize("reason", READERS)
def test_tables_that_anything_else_reads_stay(reason: str) -> None:
    body, more = READERS[reason]
    done, refusals = trim(tiny(IDS, body, {"table": (ROWS, WIDTH)} | more), KEPT, ("ids",), tied=True)
    assert bool(done) == (not reason)
    assert [one.reason for one in refusals] == ([reason] if reason else [])


def test_tables_of_branches_and_of_other_ids_stay() -> None:
    weights = {"table": (ROWS, WIDTH), "one": ints(1)}
    branches = tiny("int64[1] ids => float[] y", BRANCHES, weights, recorded=False)
    assert trim(branches, KEPT, ("ids",), tied=True)[1][0].reason.endswith("only nodes of the main graph read")
    for body in (
        "s = Add(ids, one)\ny = Gather(table, s)",
        "f = Cast<to=10>(ids)\ni = Cast<to=7>(f)\ny = Gather(table, i)",
    ):
        assert trim(tiny(IDS, body, weights), KEPT, ("ids",), tied=True) == ([], [])


def test_a_map_that_takes_more_than_the_rows_did_is_told() -> None:
    told = Trimmed(table="t", rows_before=44, rows_after=42, bytes_saved=-48, others=1, heads=())
    assert "42 of 44 rows stay, 48 bytes more, since the map" in str(told)


def test_what_goes_is_in_the_report_and_in_the_budgets(place: Path) -> None:
    result = compressed(place, ratio=0)
    model, size = result.report.data["model"], (place / "o.onnx").stat().st_size
    (table,) = result.report.data["tables"]
    assert (table["rows_before"], table["rows_after"], table["others"]) == (ROWS, len(KEPT), KEPT[0])
    assert table["bytes_saved"] == 4 * ((ROWS - len(KEPT)) * WIDTH - ROWS)
    assert (model["bytes_before"], model["bytes_after"]) == ((place / "m.onnx").stat().st_size, size)
    assert model["params_before"] - model["params_after"] == (ROWS - len(KEPT)) * WIDTH - ROWS
    assert (
        "table: 5 of 40 rows stay, 680 bytes less; ids that --keep-tokens leaves out are looked up as 7"
        in (result.report.data["notes"])
    )
    plan = compressed(place, ratio=0, dry_run=True).report.data["model"]
    assert plan["bytes_after"] == size
    share = model["params_after"] / model["params_before"]
    enough = compressed(place, target_params=f"{100 * share + 1:.0f}%", data=place / "d.npz").report.data
    assert enough["model"]["params_after"] == model["params_after"]
    assert enough["model"]["budget"]["before"] == model["params_before"]
    less = compressed(place, target_params=f"{100 * share - 30:.0f}%", data=place / "d.npz").report.data["model"]
    assert 0 < less["budget"]["limit"] - less["params_after"] < 2 * (2 * WIDTH + 1) * 8


@pytest.mark.parametrize(
    "choices",
    [
        {"unit_ratio": 0.3, "round_to": 1},
        {"unit_ratio": 0.3, "blocks": "embedding,stream,mlp", "round_to": 1},
        {"max_loss": "40%", "minimize": "params"},
        {"ratio": 0, "quantize": "int4", "block_size": 16},
        {"target_size": "70%"},
    ],
    ids=str,
)
def test_it_goes_with_all_that_makes_models_small(choices: Any, place: Path) -> None:
    result = compressed(place, data=place / "d.npz", resume=place / "steps", **choices)
    model = result.report.data["model"]
    assert model["params_before"] == ROWS * WIDTH + 2 * HIDDEN * WIDTH
    assert model["bytes_before"] == (place / "m.onnx").stat().st_size
    assert result.report.data["verification"]["headline"]["value"] < 0.5
    written = (place / "o.onnx").read_bytes()
    assert [i.name for i in onnx.load_from_string(written).graph.input] == ["ids"]
    compressed(place, data=place / "d.npz", resume=place / "steps", **choices)
    assert (place / "o.onnx").read_bytes() == written


def test_a_tied_table_loses_rows_unless_a_loss_is_limited(place: Path) -> None:
    ir.save(tied(*HEADS["transposed"]), place / "m.onnx")
    with pytest.raises(UsageError, match=r"table: it is the head .* give --ratio 0 first"):
        compressed(place, data=place / "d.npz")
    result = compressed(place, data=place / "d.npz", ratio=0)
    model = result.report.data["model"]
    gone = ROWS - len(KEPT)
    assert model["macs_before"] - model["macs_after"] == 5 * WIDTH * gone
    assert result.report.data["notes"][0].endswith("looked up as 7, and the head gives them its lowest value")
    assert result.report.data["verification"]["headline"]["value"] > 0  # what goes is not hidden from the comparison


def test_weights_in_files_and_random_inputs(place: Path) -> None:
    wide = tiny(IDS, f"x = Gather(table, ids)\n{LAYERS}", {**WEIGHTS, "table": (4000, WIDTH)})
    ir.save(wide, place / "m.onnx", external_data="m.data")
    result = compressed(place, ratio=0)
    assert result.report.data["verification"]["headline"]["value"] == 0
    assert result.report.data["verification"]["judged"]["on"] == "random"
    assert [
        tensor.name
        for tensor in onnx.load(place / "o.onnx", load_external_data=False).graph.initializer
        if tensor.external_data
    ]


def test_data_hold_kept_ids_only(place: Path) -> None:
    for name in ("data", "held_out"):
        sets = {"data": {"ids": np.full((40, 5), 7)}, "held_out": {"ids": np.full((8, 5), 12)}}
        sets[name]["ids"][3, 2] = 8
        with pytest.raises(DataError, match=r"input 'ids': id 8 occurs, and --keep-tokens leaves it out"):
            compressed(place, unit_ratio=0.3, **sets)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no ids"),
        ("[]", "holds no ids"),
        ('{"a": 1}', "holds no ids"),
        ("3\nx", "holds 'x', which is not an id"),
        ("3\n-1", "holds '-1', which is not an id"),
        ("[3, 1.5]", "holds '1.5', which is not an id"),
        ("[true]", "holds 'True', which is not an id"),
        ("[[3]]", r"holds '\[3\]', which is not an id"),
        ("[3", "cannot be read"),
        ("40", "table: it has 40 rows, and id 40 is kept"),
        (" ".join(map(str, range(ROWS))), "table: all of its rows are kept"),
    ],
)
def test_files_that_hold_something_else(text: str, told: str, place: Path) -> None:
    (place / "keep.txt").write_text(text)
    with pytest.raises(UsageError, match=told):
        compressed(place, ratio=0)


def test_other_files_and_models(place: Path) -> None:
    (place / "list.json").write_text(" [3, 1]\n")
    assert ids_of(place / "list.json") == [3, 1]
    with pytest.raises(UsageError, match=r"'.*absent' is not a file"):
        onnxgrail.compress(place / "m.onnx", keep_tokens=place / "absent", ratio=0)
    (place / "keep.txt").write_bytes(b"\xff\xfe3")
    with pytest.raises(UsageError, match="cannot be read"):
        compressed(place, ratio=0)
    types = tiny(IDS.replace("ids", "token_type_ids"), "y = Gather(table, token_type_ids)", {"table": (ROWS, WIDTH)})
    with pytest.raises(UsageError, match="the model looks up no input in a table"):
        onnxgrail.compress(types, keep_tokens=place / "list.json", ratio=0)


def test_a_recipe_names_the_file_beside_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = ("--unit-ratio", "0.3", "--data", "d.npz", "--keep-tokens", "keep.txt")
    assert called("compress", "m.onnx", "o.onnx", *words, "--save-recipe", "r.yaml").exit_code == 0
    assert "keep_tokens: keep.txt" in (place / "r.yaml").read_text()
    assert called("apply", "r.yaml", "m.onnx", "again.onnx").exit_code == 0
    assert (place / "again.onnx").read_bytes() == (place / "o.onnx").read_bytes()
    told = called("apply", "o.onnx", "m.onnx", "third.onnx", "--data", "d.npz")
    assert (told.exit_code, "Give --keep-tokens FILE" in told.stderr) == (2, True)
    assert called("apply", "o.onnx", "m.onnx", "third.onnx", *words[2:]).exit_code == 0
    assert (place / "third.onnx").read_bytes() == (place / "o.onnx").read_bytes()
    runs = json.loads({p.key: p.value for p in onnx.load(place / "o.onnx").metadata_props}["onnxgrail.recipe"])
    assert runs[-1]["recipe"]["keep_tokens"] == "keep.txt"
    assert os.fspath(place) not in json.dumps(runs)
