"""Runs that narrow channels inside attention heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.graph.rotate.inside import POSITIONS
from tests.contract.attention import SIZE, TOKENS, WIDTH, attention
from tests.inside import KERNELS
from tests.oracle import run
from tests.prenorm import VOCABULARY, prenorm
from tests.tiny import feed, numbers
from tests.unit.test_inside_refused import BENT
from tests.unit.test_normed import normed
from tests.unit.test_picked import rotary

INNER = ("qk", "vo")


@pytest.fixture(scope="module")
def ids() -> dict[str, Array]:
    """Calibration data."""
    return {"ids": np.random.default_rng(3).integers(0, VOCABULARY, (64, 6))}


@pytest.fixture(scope="module")
def rows() -> dict[str, Array]:
    """Calibration data of models that read activations."""
    return {"x": np.random.default_rng(0).normal(size=(64, TOKENS, WIDTH)).astype(np.float32)}


def blocks_of(result: Any) -> dict[str, tuple[int, int]]:
    """Units and kept units of the blocks inside heads, by kind."""
    return {b["kind"]: (b["units"], b["kept"]) for b in result.report.data["blocks"] if b["kind"] in INNER}


def test_heads_lose_channels_inside(ids: dict[str, Array]) -> None:
    model = prenorm()
    result = onnxgrail.compress(model, data=ids, unit_ratio=0.5, blocks=INNER, round_to=1)
    assert blocks_of(result) == {"qk": (4, 2), "vo": (6, 3)}
    assert len(list(result.model.graph)) == len(list(model.graph))
    got, want = (run(one, ids)["y"] for one in (result.model, model))
    assert 0 < np.abs(got - want).max() < np.abs(want).max()


@pytest.mark.parametrize("kind", INNER)
def test_one_kind_leaves_the_other_whole(kind: Any, ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(), data=ids, unit_ratio=0.5, blocks=(kind,), round_to=1)
    whole = {"qk": (4, 4), "vo": (6, 6)}
    assert blocks_of(result) == whole | {kind: (whole[kind][0], whole[kind][0] // 2)}


def test_channels_inside_go_before_whole_heads(ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(), data=ids, unit_ratio=0.5, blocks=("mlp", "heads", *INNER))
    alone = onnxgrail.compress(prenorm(), data=ids, unit_ratio=0.5, blocks=("mlp", *INNER))
    assert blocks_of(result) == {"qk": (4, 4), "vo": (6, 4)}
    assert numbers(result) == numbers(alone)


@pytest.mark.parametrize("kind", INNER)
def test_one_kind_alone_leaves_whole_heads(kind: Any, rows: dict[str, Array]) -> None:
    result = onnxgrail.compress(attention(), data=rows, unit_ratio=0.5, blocks=("heads", kind))
    assert [block["kind"] for block in result.report.data["blocks"]] == ["heads"]


def test_whole_heads_go_where_queries_keep_their_channels(rows: dict[str, Array]) -> None:
    found = [
        onnxgrail.compress(BENT["normalized"], data=rows, unit_ratio=0.5, round_to=1, blocks=blocks)
        for blocks in (("heads", *INNER), ("heads",), INNER)
    ]
    kinds = [[block["kind"] for block in result.report.data["blocks"]] for result in found]
    assert kinds == [["heads"], ["heads"], ["vo"]]
    assert numbers(found[0]) == numbers(found[1])


def test_a_width_of_whole_heads_is_kept(rows: dict[str, Array]) -> None:
    whole = onnxgrail.compress(attention(), data=rows, unit_ratio=0.5, blocks=("heads",))
    (block,) = whole.report.data["blocks"]
    again = onnxgrail.compress(attention(), data=rows, widths={block["name"]: block["kept"]})
    assert numbers(again) == numbers(whole)
    assert not blocks_of(again)


@pytest.mark.parametrize("choices", [{"unit_ratio": 0.5}, {"ratio": 0.5, "allocate": "uniform"}])
def test_pairs_stay_where_all_blocks_lose_an_equal_share(choices: dict[str, Any]) -> None:
    model = rotary("halves")
    rows = {name: np.concatenate([array] * 8) for name, array in feed(model).items()}
    kinds = [
        {block["kind"] for block in onnxgrail.compress(model, data=rows, **more).report.data["blocks"]}
        for more in (choices, choices | {"blocks": INNER}, {"ratio": 0.5})
    ]
    assert kinds == [{"heads"}, {"qk", "vo"}, {"qk", "vo"}]


@pytest.mark.parametrize(("norm", "way"), [("divided", "halves"), ("one operator", "none")])
def test_normalized_queries_lose_channels_by_default_and_again(norm: str, way: str, tmp_path: Path) -> None:
    model = normed(norm, way)
    rows = {name: np.concatenate([array] * 8) for name, array in feed(model).items()}
    first = onnxgrail.compress(model, tmp_path / "first.onnx", data=rows, ratio=0.3, round_to=1)
    assert {block["kind"] for block in first.report.data["blocks"]} == {"qk", "vo"}
    assert all(kept < units for units, kept in blocks_of(first).values())
    onnxgrail.apply(tmp_path / "first.onnx", model, tmp_path / "again.onnx", data=rows)
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "first.onnx").read_bytes()


def test_a_layer_that_loses_values_alone_keeps_its_norms() -> None:
    model = normed("one operator", "halves")
    rows = {name: np.concatenate([array] * 8) for name, array in feed(model).items()}
    result = onnxgrail.compress(model, data=rows, unit_ratio=0.5, blocks=("vo",), round_to=1)
    assert [kept < units for units, kept in blocks_of(result).values()] == [False, True]
    ops = [node.op_type for node in result.model.graph]
    assert (ops.count("RMSNormalization"), ops.count("Pow")) == (2, 0)


def test_they_go_together_with_the_stream(ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(), data=ids, target_params="60%", blocks=("mlp", "stream", *INNER), round_to=1)
    model = result.report.data["model"]
    assert model["params_after"] <= 0.6 * model["params_before"]
    assert run(result.model, ids)["y"].shape == run(prenorm(), ids)["y"].shape


def test_inspect_lists_them_beside_whole_heads() -> None:
    found = onnxgrail.inspect(attention())
    assert [(block["kind"], block["units"]) for block in found.blocks] == [("heads", 4), ("qk", 2), ("vo", 2)]
    assert {"heads", "qk", "vo"} <= found.shares.keys()


def test_inspect_names_what_keeps_its_channels() -> None:
    found = onnxgrail.inspect(BENT["normalized"])
    assert [block["kind"] for block in found.blocks] == ["heads", "vo"]
    assert [(refusal.op, refusal.reason) for refusal in found.refusals][-1] == ("MatMul", POSITIONS)


@pytest.mark.parametrize("name", KERNELS)
def test_fused_kernels_lose_channels(name: str, rows: dict[str, Array]) -> None:
    model = KERNELS[name]
    result = onnxgrail.compress(model, data=rows, unit_ratio=0.5, blocks=INNER, round_to=1)
    assert blocks_of(result) == dict.fromkeys(INNER, (SIZE, SIZE // 2))
    got, want = (run(one, rows)["y"] for one in (result.model, model))
    assert 0 < np.square(got - want).mean() < 0.5 * np.square(want).mean()
    assert onnxgrail.inspect(model).shares.keys() >= {*INNER}


def test_a_run_is_repeated_to_the_same_bytes(tmp_path: Path, ids: dict[str, Array]) -> None:
    choices: dict[str, Any] = {"data": ids, "unit_ratio": 0.5, "blocks": INNER, "round_to": 1}
    first, again = (
        onnxgrail.compress(prenorm(), tmp_path / f"{name}.onnx", resume=tmp_path / "parts", **choices) for name in "ab"
    )
    assert numbers(first) == numbers(again)
    repeated = onnxgrail.apply(tmp_path / "a.onnx", prenorm(), data=ids)
    assert numbers(repeated) == numbers(first)
