"""Runs that narrow a residual stream in a basis of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.algebra.fit.compensate import grail
from onnxgrail.calibration.stream import stream, ways
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Array, Block, Probe, Reducer, View
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine import amounts
from onnxgrail.models import load
from onnxgrail.narrowing import best, rotation, searching
from onnxgrail.search import trials
from tests.oracle import run
from tests.prenorm import HIDDEN, VOCABULARY, WIDTH, prenorm
from tests.tiny import numbers, tiny

SAMPLES = 64


@pytest.fixture(scope="module")
def ids() -> dict[str, Array]:
    """Calibration data."""
    return {"ids": np.random.default_rng(3).integers(0, VOCABULARY, (SAMPLES, 6))}


def stream_of(result: Any) -> dict[str, Any]:
    """The report entry of the only stream."""
    (found,) = [block for block in result.report.data["blocks"] if block["kind"] == "stream"]
    return dict(found)


def test_a_stream_is_narrowed_like_any_block(ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(), data=ids, unit_ratio=0.5, round_to=1)
    assert stream_of(result)["units"] == WIDTH
    assert stream_of(result)["kept"] == WIDTH // 2
    assert run(result.model, {"ids": ids["ids"][:3]})["y"].shape == (3, 6, 5)
    kinds = {node.op_type for node in result.model.graph}
    assert "SimplifiedLayerNormalization" not in kinds


def test_the_last_normalization_may_be_an_output(ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(end="normalized and scores"), data=ids, unit_ratio=0.5, round_to=1)
    assert stream_of(result)["kept"] == WIDTH // 2
    assert [value.name for value in result.model.graph.outputs] == ["z", "y"]


@pytest.mark.parametrize(
    ("choices", "option"),
    [({"compensate": "grail"}, "--compensate best"), ({"reducer": "fold"}, "--reducer prune"), ({}, "--data")],
)
def test_a_stream_that_keeps_its_basis_names_what_changes_it(
    ids: dict[str, Array], choices: dict[str, Any], option: str
) -> None:
    data = {"data": ids} if choices else {}
    result = onnxgrail.compress(prenorm(), unit_ratio=0.5, **choices, **data)
    reasons = [refusal["reason"] for refusal in result.report.data["refusals"]]
    turned = [block for block in onnxgrail.inspect(prenorm()).blocks if block["kind"] in ("stream", "qk", "vo")]
    assert {*reasons} == {f"it is narrowed with {option} only", "it is an output of the model"}
    assert reasons.count(f"it is narrowed with {option} only") == len(turned)
    with pytest.raises(onnxgrail.NothingToCompressError, match=f"it is narrowed with {option} only"):
        onnxgrail.compress(prenorm(), unit_ratio=0.5, blocks=("stream",), **choices, **data)


def test_a_stream_that_is_not_asked_for_is_named_so(ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(), unit_ratio=0.5, blocks=("mlp", "heads"), data=ids)
    reasons = [refusal["reason"] for refusal in result.report.data["refusals"]]
    assert "it is narrowed with --blocks stream only" in reasons
    assert not [reason for reason in reasons if "mixes" in reason or "combined" in reason]


def test_shares_are_net_of_the_matrices_that_a_basis_needs() -> None:
    plain, other = (onnxgrail.inspect(prenorm(end=end, depth=2)) for end in ("scores", "normalized and scores"))
    assert plain.params == other.params
    left = [round((1 - found.shares["stream"]["params"]) * found.params) for found in (plain, other)]
    held = [next(block["params"] for block in found.blocks if block["kind"] == "stream") for found in (plain, other)]
    assert held[1] - held[0] == WIDTH**2
    assert left[1] - left[0] == WIDTH  # the shift of the normalization that is an output


def test_matrices_of_a_stream_that_stays_whole_take_nothing_from_the_budget(ids: dict[str, Array]) -> None:
    model = prenorm(end="normalized and scores", depth=2)
    (name,) = [block["name"] for block in onnxgrail.inspect(model).blocks if block["kind"] == "stream"]
    asked = {"data": ids, "target_params": "80%", "round_to": 1, "selector": "wanda"}  # others decide by last bits
    result = onnxgrail.compress(model, exclude=f"^{name}$", **asked)
    alone = onnxgrail.compress(model, blocks=("mlp", "heads"), **asked)
    assert result.report.data["model"]["budget"] == alone.report.data["model"]["budget"]
    assert numbers(result) == numbers(alone)


def test_a_tied_head_is_not_fitted_since_that_needs_a_copy_of_the_table(ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(end="tied", depth=2), data=ids, target_params="75%", blocks=("stream",))
    budget = result.report.data["model"]["budget"]
    assert budget["achieved"] <= budget["limit"]
    fitted = [layer["weight"] for layer in result.report.data["refits"]]
    assert "up0" in fitted
    assert "f0" not in fitted


def test_a_stream_that_keeps_all_channels_stays_as_it_is(ids: dict[str, Array]) -> None:
    name = next(
        b["name"] for b in onnxgrail.inspect(prenorm()).blocks if b["name"].endswith("mlp") and b["units"] == HIDDEN
    )
    result = onnxgrail.compress(prenorm(), data=ids, widths={name: 4})
    alone = onnxgrail.compress(prenorm(), data=ids, widths={name: 4}, blocks=("mlp", "heads"))
    assert numbers(result) == numbers(alone)
    assert sum(node.op_type == "LayerNormalization" for node in result.model.graph) == 3


def test_the_whole_of_a_ratio_holds_the_stream_that_was_left_alone(ids: dict[str, Array]) -> None:
    name = [b["name"] for b in onnxgrail.inspect(prenorm()).blocks if b["name"].endswith("mlp")][-1]
    left, cut = (
        onnxgrail.compress(prenorm(), data=ids, **choice)
        for choice in ({"widths": {name: 4}}, {"ratio": 0.6, "allocate": "uniform"})
    )
    assert stream_of(cut)["kept"] < WIDTH
    assert left.report.data["model"]["ratio_total"] == cut.report.data["model"]["ratio_total"]


def test_widths_of_the_values_of_a_single_head_keep_its_basis(ids: dict[str, Array]) -> None:
    values = next(b for b in onnxgrail.inspect(prenorm()).blocks if b["name"].endswith("mlp"))
    result = onnxgrail.compress(prenorm(), data=ids, widths={values["name"]: 4})
    assert [(b["kind"], b["kept"]) for b in result.report.data["blocks"] if b["name"] == values["name"]] == [("mlp", 4)]
    assert not [b for b in result.report.data["blocks"] if b["kind"] in ("qk", "vo")]


def test_a_dry_run_predicts_the_file(tmp_path: Path, ids: dict[str, Array]) -> None:
    made = [
        onnxgrail.compress(prenorm(), tmp_path / "out.onnx", data=ids, ratio=0.4, dry_run=dry).report.data["model"]
        for dry in (True, False)
    ]
    assert made[0]["bytes_after"] == pytest.approx(made[1]["bytes_after"], rel=0.02)
    assert made[0]["params_after"] == made[1]["params_after"]


def test_without_data_there_is_no_basis() -> None:
    result = onnxgrail.compress(prenorm(), unit_ratio=0.5)
    assert not [block for block in result.report.data["blocks"] if block["kind"] == "stream"]


@pytest.mark.parametrize("choice", [{"compensate": "grail"}, {"reducer": "fold"}, {"blocks": ("mlp",)}])
def test_other_methods_leave_the_basis(choice: dict[str, Any], ids: dict[str, Array]) -> None:
    result = onnxgrail.compress(prenorm(), data=ids, unit_ratio=0.5, **choice)
    assert sum(node.op_type == "LayerNormalization" for node in result.model.graph) == 3


def test_inspect_lists_the_stream() -> None:
    (stream,) = [b for b in onnxgrail.inspect(prenorm()).blocks if b["kind"] == "stream"]
    assert stream["units"] == WIDTH
    assert {"table", "down0", "mix_out0"} <= set(stream["producers"])
    assert {"query0", "up0", "head"} <= set(stream["consumers"])


def test_a_run_is_repeated_to_the_same_bytes(tmp_path: Path, ids: dict[str, Array]) -> None:
    given = tmp_path / "model.onnx"
    ir.save(prenorm(), given)
    for number in range(2):
        out = tmp_path / f"out{number}.onnx"
        onnxgrail.compress(given, out, data=ids, ratio=0.4, resume=tmp_path / f"folder{number}")
    again = tmp_path / "out1.onnx"
    onnxgrail.compress(given, again, data=ids, ratio=0.4, resume=tmp_path / "folder1", force=True)
    assert (tmp_path / "out0.onnx").read_bytes() == again.read_bytes()


def test_second_moments_are_measured_in_parts_that_fit(
    tmp_path: Path, ids: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, apart, together = tmp_path / "whole.onnx", tmp_path / "apart.onnx", []
    onnxgrail.compress(prenorm(depth=3), whole, data=ids, ratio=0.4, blocks=("stream",))
    monkeypatch.setattr(rotation, "PART", 2 * 8 * WIDTH**2)
    measure = Stream.measure

    def counted(self: Stream, probes: Sequence[Probe], *rest: Any, **more: Any) -> Any:
        together.append([probe.width for probe in probes])
        return measure(self, probes, *rest, **more)

    monkeypatch.setattr(Stream, "measure", counted)
    onnxgrail.compress(prenorm(depth=3), apart, data=ids, ratio=0.4, blocks=("stream",))
    assert together[:4] == [[WIDTH] * 2] * 3 + [[WIDTH]]
    assert apart.read_bytes() == whole.read_bytes()


def test_a_large_model_is_never_run_or_read_as_a_whole(ids: dict[str, Array], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may not fit into memory: second moments are measured with the nodes of one layer at a time."""
    nodes: list[int] = []
    held: list[tuple[str, Any]] = []
    cut, read = ways.cut, weights.read

    def counted(*args: Any) -> ir.Model:
        piece = cut(*args)
        nodes.append(len(piece.graph))
        return piece

    def reading(block: Block, *args: Any) -> Any:
        channels = read(block, *args)
        held.append((block.kind, channels))
        return channels

    whole = onnxgrail.compress(prenorm(depth=6), data=ids, unit_ratio=0.4)
    monkeypatch.setattr(ways, "cut", counted)
    monkeypatch.setattr(weights, "read", reading)
    monkeypatch.setattr(weights, "HELD", 8 * 3 * WIDTH * HIDDEN)
    monkeypatch.setattr(stream, "MUCH", 0)
    large = onnxgrail.compress(prenorm(depth=6), data=ids, unit_ratio=0.4)
    assert max(nodes) < len(prenorm(depth=6).graph) / 3
    lazy = next(channels for kind, channels in held if kind == "stream")
    assert lazy[0] is not lazy[0]
    kept = next(channels for kind, channels in held if kind == "mlp")
    assert kept[0] is kept[0]
    one, two = (run(result.model, {"ids": ids["ids"][:3]})["y"] for result in (whole, large))
    np.testing.assert_allclose(two, one, atol=1e-3 * np.abs(one).max())


def test_a_search_finds_the_same_losses_of_blocks_for_a_large_model(
    ids: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "TOGETHER", 1)  # so that blocks are measured one after another
    found: list[dict[str, tuple[float, ...]]] = []
    alone = trials._alone

    def harms(*args: Any) -> Any:
        some = alone(*args)
        found.append({harm.block: harm.losses for harm in some})
        return some

    monkeypatch.setattr(trials, "_alone", harms)
    for much in (stream.MUCH, 0):
        monkeypatch.setattr(stream, "MUCH", much)
        onnxgrail.compress(prenorm(depth=3), data=ids, ratio=0.4)
    assert found[0].keys() == found[1].keys()
    for block, losses in found[0].items():
        np.testing.assert_allclose(losses, found[1][block], rtol=1e-2, atol=1e-4)


def with_a_table() -> ir.Model:
    """A model of which most parameters are in a table of low rank."""
    rng = np.random.default_rng(0)
    table = (rng.normal(size=(200, 4)) @ rng.normal(size=(4, WIDTH))).astype(np.float32)
    text = "e = Gather(table, ids)\nr = Relu(e)\nh = MatMul(r, up)\na = Relu(h)\ny = MatMul(a, down)"
    weights = {"table": table, "up": (WIDTH, HIDDEN), "down": (HIDDEN, 3)}
    return tiny("int64[N,S] ids => float[N,S,3] y", text, weights)


def test_a_table_is_narrowed_if_a_size_is_asked_for() -> None:
    data = {"ids": np.random.default_rng(5).integers(0, 200, (SAMPLES, 6))}
    result = onnxgrail.compress(with_a_table(), data=data, target_params="50%")
    (table,) = [block for block in result.report.data["blocks"] if block["kind"] == "embedding"]
    assert table["kept"] < WIDTH
    sizes = result.report.data["model"]
    assert sizes["params_before"] == 200 * WIDTH + WIDTH * HIDDEN + HIDDEN * 3
    assert sizes["params_after"] <= sizes["params_before"] / 2
    want = run(with_a_table(), data)["y"]
    assert np.abs(run(result.model, data)["y"] - want).max() < 0.2 * np.abs(want).max()
    assert not any("onnxgrail.rotated" in node.metadata_props for node in result.model.graph)
    macs = onnxgrail.compress(with_a_table(), data=data, target_macs="60%")
    assert not [block for block in macs.report.data["blocks"] if block["kind"] == "embedding"]


@pytest.mark.parametrize("head", ["MatMul", "Gemm"])
def test_a_table_that_is_the_head_too_is_narrowed(tmp_path: Path, head: str) -> None:
    rng = np.random.default_rng(0)
    table = (rng.normal(size=(200, 4)) @ rng.normal(size=(4, WIDTH))).astype(np.float32)
    text = "e = Gather(table, ids)\nh = MatMul(e, up)\na = Tanh(h)\n"
    if head == "MatMul":
        text += "f = Transpose <perm=[1,0]> (table)\ny = MatMul(a, f)"
    else:
        text += "one = Gather <axis=1> (a, zero)\ny = Gemm <transB=1> (one, table)"
    weights = {"table": table, "up": (WIDTH, WIDTH), "zero": np.array(0, dtype=np.int64)}
    model = tiny("int64[N,S] ids => float[] y", text, {k: v for k, v in weights.items() if k in text}, recorded=False)
    ir.save(model, tmp_path / "tied.onnx")
    data = {"ids": rng.integers(0, 200, (SAMPLES, 6))}
    choices = {"target_params": "70%", "blocks": ("embedding",), "round_to": 1}
    result = onnxgrail.compress(tmp_path / "tied.onnx", tmp_path / "out.onnx", data=data, **choices)
    (block,) = [block for block in result.report.data["blocks"] if block["kind"] == "embedding"]
    assert 4 <= block["kept"] < WIDTH
    slim = ir.load(tmp_path / "out.onnx")
    assert {node.domain for node in slim.graph} == {""}
    want = run(model, data)["y"]
    assert np.abs(run(slim, data)["y"] - want).max() < 0.02 * np.abs(want).max()


def test_the_vision_transformer_loses_less_than_without_its_stream() -> None:
    vit = load("digits_vit")
    held_out = np.load(vit.heldout)

    def right(**choices: Any) -> float:
        found = onnxgrail.compress(
            vit.model, data=vit.calibration, target_params="50%", dry_run=True, allocate="uniform", **choices
        ).model
        return float((run(found, {"images": held_out["images"]})["logits"].argmax(axis=1) == held_out["labels"]).mean())

    assert right() > right(blocks=("mlp", "heads"))


def test_inspect_tells_the_sizes_of_the_model_as_it_was_read() -> None:
    """A matrix after the lookup is added only if channels of the table are removed."""
    found = onnxgrail.inspect(with_a_table())
    assert "embedding" in {block["kind"] for block in found.blocks}
    done = onnxgrail.compress(with_a_table(), unit_ratio=0, samples=2, check=False).report.data["model"]
    assert (found.params, found.macs) == (done["params_before"], done["macs_before"])
    assert all(share <= 1 for shares in found.shares.values() for share in shares.values())


@pytest.mark.parametrize("limit", [amounts.FIT, 1])
def test_what_reads_a_large_stream_is_not_compensated_at_once(
    limit: int, ids: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights that read a stream may take more memory than there is; their fits follow one by one."""
    compensated, whole = [], grail.normals

    def normals(view: View, reducer: Reducer) -> Any:
        compensated.append(view.block.kind)
        return whole(view, reducer)

    monkeypatch.setattr(grail, "normals", normals)
    monkeypatch.setattr(amounts, "FIT", limit)
    monkeypatch.setattr(best._Walk, "_fits", lambda _, stage: "head" not in {t.consumer.value for t in stage.tasks})
    result = onnxgrail.compress(prenorm(), data=ids, unit_ratio=0.5, round_to=1, cache_budget="1")
    assert ("stream" in compensated) == (limit > 1)
    assert stream_of(result)["kept"] == WIDTH // 2
    assert sum(one["after"] is not None for one in result.report.data["refits"]) > 3
