"""Mistakes that would give a wrong result without a word are told: in data, in options, and in recipes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.feeds.signature import Input
from onnxgrail.cli import main
from onnxgrail.core import Recipe
from onnxgrail.errors import DataError, MetricError, ModelError, UsageError
from onnxgrail.report.notes import idle
from tests.reading import read
from tests.tiny import tiny

from . import nets

I64 = np.dtype(np.int64)
IDS = Input(name="input_ids", dtype=I64, shape=("n", "s"), rows=9)
MASK = Input(name="attention_mask", dtype=I64, shape=("n", "s"))
TOKENS = np.arange(8).reshape(2, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors())
    return tmp_path


def told(*words: str) -> str:
    """The message of a command that ends with a usage error."""
    result = CliRunner().invoke(main, ["compress", *words])
    assert result.exit_code == 2
    return result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exclude", "a", "--exclude=b"], "--exclude is given twice: join the values: --exclude 'A|B'"),
        (["--blocks", "mlp", "--blocks", "conv"], "join the values: --blocks 'A,B'"),
        (["--data", "a.npz", "--calib", "b.npz"], "--calib is given twice: give it once"),
    ],
)
def test_values_that_would_get_lost(words: list[str], message: str) -> None:
    assert message in told("m.onnx", *words)


def test_the_last_number_counts(folder: Path) -> None:
    words = ["compress", str(folder / "m.onnx"), "--ratio", "0.3", "--ratio", "0", "--dry-run"]
    assert CliRunner().invoke(main, words).exit_code == 0


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("o.ort", "convert_onnx_models_to_ort"),
        ("d.npz", "--data"),
        ("0.3", "--ratio"),
        ("r.html", "--report"),
        ("r.yaml", "--save-recipe"),
    ],
)
def test_an_output_with_the_name_of_something_else(folder: Path, name: str, option: str) -> None:
    before = (folder / "d.npz").read_bytes()
    words = ["compress", str(folder / "m.onnx"), str(folder / name), "--ratio", "0.3", "--force"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert option in result.stderr
    assert (folder / "d.npz").read_bytes() == before
    assert onnxgrail.compress(folder / "m.onnx", folder / "v1.0", ratio=0.3).output == folder / "v1.0"


def test_a_mask_that_hides_everything() -> None:
    data = {"input_ids": TOKENS, "attention_mask": np.zeros_like(TOKENS)}
    for feeds in (data, [data, data]):
        with pytest.raises(DataError, match=r"'attention_mask': 0 everywhere. 1 is a token"):
            read(feeds, (IDS, MASK))
    data["attention_mask"][1, 0] = 1
    assert len(read(data, (IDS, MASK))) == 1
    zeros = {"input_ids": np.zeros_like(TOKENS), "attention_mask": np.ones_like(TOKENS)}
    assert len(read(zeros, (IDS, MASK))) == 1


def test_ids_below_zero() -> None:
    with pytest.raises(DataError, match=r"ids down to -100, .* -1 and -100 are for labels"):
        read({"input_ids": np.where(TOKENS > 6, -100, TOKENS)}, (IDS,))


def labels_of(values: Any) -> tuple[Any, str]:
    batches = read({"input_ids": TOKENS, "labels": np.asarray(values)}, (IDS,))
    (fed,) = batches.labelled()
    return fed[1], batches.notes[0]


def test_labels_that_are_the_tokens_are_answers_one_position_earlier() -> None:
    padded = np.where(TOKENS > 6, -100, TOKENS)
    for values in (TOKENS, padded, padded.astype(np.int32)):
        labels, note = labels_of(values)
        wanted = np.concatenate([values[:, 1:], [[-1], [-1]]], axis=1)
        np.testing.assert_array_equal(labels.values, wanted)
        assert "one position earlier" in note
    for other in (TOKENS + 1, np.full_like(TOKENS, -100)):
        labels, note = labels_of(other)
        np.testing.assert_array_equal(labels.values, other)
        assert note.endswith("taken for the right answers")


def test_labels_that_do_not_fit() -> None:
    labels, note = labels_of([0, 1, 2])
    assert labels is None
    assert note.endswith("was ignored: it has 3 rows, the inputs have 2")
    with pytest.raises(DataError, match=r"no input named 'label'.*If 'label' holds the right answers, call it"):
        read({"input_ids": TOKENS, "label": np.zeros(2, np.int64)}, (IDS,))


def test_held_out_data_that_are_the_calibration_data(folder: Path) -> None:
    choices: dict[str, Any] = {"ratio": 0.3, "data": folder / "d.npz"}
    same = onnxgrail.compress(nets.mlp(), held_out=folder / ".." / folder.name / "d.npz", **choices).report.data
    assert any("the held-out data are the calibration data" in note for note in same["calibration"]["notes"])
    np.savez(folder / "e.npz", **nets.vectors(seed=4))
    other = onnxgrail.compress(nets.mlp(), held_out=folder / "e.npz", **choices).report.data
    assert not any("held-out" in note for note in other["calibration"]["notes"])
    with np.load(folder / "d.npz") as file:
        half = {"x": np.concatenate([np.load(folder / "e.npz")["x"][:9], file["x"][::-1][:7]])}
    some = onnxgrail.compress(nets.mlp(), held_out=half, **choices).report.data
    assert any("7 of 16 held-out samples are calibration samples" in note for note in some["calibration"]["notes"])
    assert [one["verification"]["judged"]["seen"] for one in (same, other, some)] == [True, False, True]
    limits: dict[str, Any] = {"max_loss": 0.5, "minimize": "params", "data": folder / "d.npz"}
    found = onnxgrail.compress(nets.mlp(), held_out=half, **limits).report
    assert any("on 16 samples of which fits have seen some" in line for line in found.asked_lines())
    with pytest.raises(UsageError, match="--held-out must be a number of samples"):
        onnxgrail.compress(nets.mlp(), held_out=0.2, **choices)


@pytest.mark.parametrize(("quantize", "seen"), [("int8", True), ("int4", True), ("fp16", False)])
def test_samples_that_a_fit_has_seen_are_told_after_quantization_too(quantize: str, seen: bool) -> None:
    report = onnxgrail.compress(nets.mlp(), ratio=0, data=nets.vectors(), held_out=0, quantize=quantize).report
    assert report.data["quantization"]["judged"]["seen"] is seen
    assert (report.data["calibration"] is not None) is seen
    assert ("the fit has seen these samples" in str(report)) is seen


def test_a_recipe_of_a_run_with_data_needs_data(folder: Path) -> None:
    (folder / "r").mkdir()
    choices: dict[str, Any] = {"ratio": 0.3, "data": folder / "d.npz"}
    first = onnxgrail.compress(folder / "m.onnx", folder / "a.onnx", save_recipe=folder / "r" / "r.yaml", **choices)
    recipe = folder / "r" / "r.yaml"
    with pytest.raises(UsageError, match=r"r.yaml is of a run with data, which it does not name. Give --data DATA"):
        onnxgrail.apply(recipe, folder / "m.onnx", folder / "b.onnx")
    again = onnxgrail.apply(recipe, folder / "m.onnx", folder / "b.onnx", data=folder / "d.npz")
    assert first.output is not None
    assert again.output is not None
    assert again.output.read_bytes() == first.output.read_bytes()
    choices = {"data": nets.vectors(), "minimize": "params"}
    judged = folder / "judged.yaml"
    onnxgrail.compress(nets.mlp(), max_loss=0.5, metric=_apart, save_recipe=judged, **choices)
    with pytest.raises(UsageError, match=r"judged.yaml is of a run with metric, .* Give --metric"):
        onnxgrail.apply(judged, nets.mlp(), data=nets.vectors())
    onnxgrail.apply(judged, nets.mlp(), data=nets.vectors(), metric=_apart)
    onnxgrail.compress(folder / "m.onnx", folder / "c.onnx", ratio=0.3, save_recipe=folder / "r" / "random.yaml")
    onnxgrail.apply(folder / "r" / "random.yaml", folder / "m.onnx", folder / "d.onnx")


def test_a_model_tells_that_samples_were_held_out(folder: Path) -> None:
    choices: dict[str, Any] = {"ratio": 0.3, "data": folder / "d.npz"}
    plain = onnxgrail.compress(nets.mlp(), **choices).to_bytes()
    for held_out in (8, "8", 0):
        first = onnxgrail.compress(nets.mlp(), folder / "a.onnx", held_out=held_out, force=True, **choices)
        for recipe in (folder / "a.onnx", first.model, first.proto(), first.to_bytes()):
            again = onnxgrail.apply(recipe, nets.mlp(), data=folder / "d.npz")
            assert again.to_bytes() == first.to_bytes() != plain
    np.savez(folder / "e.npz", **nets.vectors(seed=4))
    choices = {"unit_ratio": 0.3, "data": folder / "d.npz"}
    beside = onnxgrail.compress(nets.mlp(), held_out=folder / "e.npz", **choices)  # they choose nothing
    assert onnxgrail.apply(beside.model, nets.mlp(), data=folder / "d.npz").to_bytes() == beside.to_bytes()
    choices = {"max_loss": 0.5, "minimize": "params", "data": folder / "d.npz"}
    judged = onnxgrail.compress(nets.mlp(), held_out=folder / "e.npz", **choices)
    with pytest.raises(UsageError, match="the model is of a run with held-out data, which it does not name"):
        onnxgrail.apply(judged.model, nets.mlp(), data=folder / "d.npz")
    again = onnxgrail.apply(judged.model, nets.mlp(), data=folder / "d.npz", held_out=folder / "e.npz")
    assert again.to_bytes() == judged.to_bytes()


def test_what_is_no_recipe_is_told(folder: Path) -> None:
    report = onnxgrail.compress(nets.mlp(), ratio=0.3, data=folder / "d.npz").report
    again = onnxgrail.apply(dict(report.data), nets.mlp(), data=folder / "d.npz")
    assert again.report.data["model"]["params_after"] == report.data["model"]["params_after"]
    for wrong in (report, 3, {"schema": "onnxgrail.frontier/1"}):
        with pytest.raises(UsageError, match=r"a recipe of type|is no report of a run of `compress`"):
            onnxgrail.apply(wrong, nets.mlp(), data=folder / "d.npz")


def test_labels_of_whole_texts_leave_their_tokens_to_be_predicted() -> None:
    model = models.load("char_llama")
    with np.load(model.calibration) as file:
        ids = file["input_ids"][:4, :24]
    labels = {"labels": np.zeros(len(ids), np.int64)}
    found = [onnxgrail.compare(model.model, model.model, data={"input_ids": ids, **more}) for more in ({}, labels)]
    assert found[0].outputs[0].perplexity == found[1].outputs[0].perplexity is not None


def test_few_samples_to_fit_to_are_told_whatever_is_held_out() -> None:
    choices: dict[str, Any] = {"ratio": 0.3, "data": nets.vectors(100)}
    notes = onnxgrail.compress(nets.mlp(), held_out=80, **choices).report.data["notes"]
    assert any(note.startswith("calibrated on 20 samples: ") for note in notes)
    notes = onnxgrail.compress(nets.mlp(), held_out=nets.vectors(24, seed=9), samples=4, **choices).report.data["notes"]
    (told,) = (note for note in notes if note.startswith("calibrated on 4 samples: "))
    assert "--held-out" not in told
    assert "does not show it" not in told


def test_a_metric_of_held_out_labels_has_labels() -> None:
    held = {**nets.vectors(40, seed=9), "labels": np.zeros(40, np.int64)}
    choices: dict[str, Any] = {"max_loss": 0.5, "minimize": "params", "data": nets.vectors(64)}
    for held_out, none in ((held, False), (nets.vectors(40, seed=9), True)):
        made = onnxgrail.compress(nets.mlp(), held_out=held_out, metric=lambda a, b, c: np.zeros(40), **choices)
        (told,) = (note for note in made.report.data["notes"] if "is 0 on all 40 samples" in note)
        assert ("its third argument was None" in told) is none
    better = onnxgrail.compress(nets.mlp(), metric=lambda a, b, _: -np.abs(a["y"] - b["y"]).mean(axis=1), **choices)
    assert not any("is 0 on all" in note for note in better.report.data["notes"])


def _apart(reference: Any, candidate: Any, labels: Any) -> Any:
    return np.square(reference["y"] - candidate["y"]).mean(axis=1)


def test_options_without_an_effect_are_noted() -> None:
    assert idle(Recipe(ratio=0.3)) == []
    assert idle(Recipe(ratio=0.3, quantize="int4", block_size=64, qdq=True)) == []
    assert idle(Recipe(max_loss=0.01, minimize="size", block_size=64, budget_seconds=5.0)) == []
    assert idle(Recipe(ratio=0.3, quantize="int8", block_size=64, qdq=True)) == [
        "--block-size does nothing without --quantize int4 or int8-weights"
    ]
    assert idle(Recipe(ratio=0.3, block_size=64, symmetric=True, qdq=True, minimize="size", budget_seconds=5.0)) == [
        "--block-size, --symmetric do nothing without --quantize int4 or int8-weights",
        "--qdq does nothing without --quantize int8, int4 or int8-weights",
        "--minimize does nothing without --max-loss",
        "--budget-seconds does nothing without --max-loss or --refine",
    ]
    assert idle(Recipe(ratio=0.3, grasp_retain=0.5, grasp_whiten=True, ic_rank=3, fit=("weights",))) == [
        "--grasp-retain, --grasp-whiten do nothing without --method grasp",
        "--ic-rank does nothing without --method ic",
    ]
    assert idle(Recipe(ratio=0.3, compensate="none", reducer="fold", fit=("plain",), ridge=0.1, selector="l1")) == [
        "--fit does nothing without --compensate best",
        "--ridge does nothing without --compensate grail or best",
        "--selector does nothing without --reducer prune",
    ]
    assert idle(Recipe(ratio=0.3, method=("grail", "grasp", "ic"), grasp_retain=0.5, ic_rank=3)) == []


@pytest.mark.parametrize(("exclude", "noted"), [("nothing_like_it", True), (".", False), (None, False)])
def test_an_expression_that_excludes_nothing_is_noted(exclude: str | None, noted: bool) -> None:
    with pytest.raises(onnxgrail.NothingToCompressError) if exclude == "." else nullcontext():
        notes = onnxgrail.compress(nets.mlp(), ratio=0.3, exclude=exclude).report.data["notes"]
        assert any("matches no block" in note for note in notes) is noted


def test_several_expressions_of_a_program() -> None:
    def left(**choices: Any) -> dict[str, int]:
        blocks = onnxgrail.compress(nets.mlp(), ratio=0.3, **choices).report.data["blocks"]
        return {block["name"]: block["kept"] for block in blocks}

    whole = left()
    names = list(whole)
    assert left(exclude=[names[0], names[-1]]) == left(exclude=f"{names[0]}|{names[-1]}") != whole
    with pytest.raises(UsageError, match="exclude is 3, expected text, or a list of texts"):
        left(exclude=3)


def test_words_of_the_command_line_in_python() -> None:
    with pytest.raises(UsageError, match=r"no option 'device' in Python. Give providers="):
        onnxgrail.compress(nets.mlp(), ratio=0.3, device="cpu")


def test_models_with_inputs_of_other_sizes() -> None:
    with pytest.raises(ModelError, match=r"take inputs of other sizes: A x .*, B x "):
        onnxgrail.compare(nets.mlp(), _wider())


def _wider() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n,99] x) => (float[n,99] y) {y = Relu(x)}'
    )


def test_a_file_of_another_kind_is_no_numpy_file(folder: Path) -> None:
    (folder / "bad.npz").write_text("hello")
    with pytest.raises(DataError, match=r"bad.npz' is no NumPy file"):
        onnxgrail.compress(nets.mlp(), ratio=0.3, data=folder / "bad.npz")
    np.save(folder / "pickled.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="holds pickled objects"):
        onnxgrail.compress(nets.mlp(), ratio=0.3, data=folder / "pickled.npy")


def test_an_error_of_a_metric_names_its_line_and_the_outputs(folder: Path) -> None:
    (folder / "met.py").write_text(
        'def odd(a, b, labels):\n    """Asks for what is not there."""\n    return a["nope"]\n'
    )
    with pytest.raises(MetricError, match=r"raised KeyError: 'nope' \(sample 0, line 3\). The outputs are 'y'"):
        onnxgrail.compress(nets.mlp(), data=nets.vectors(), metric=f"{folder / 'met.py'}:odd")


def test_a_metric_that_sees_no_labels_is_told(folder: Path) -> None:
    (folder / "met.py").write_text("def none(a, b, labels):\n    return 0.0\n")
    report = onnxgrail.compress(
        nets.mlp(), data=nets.vectors(), minimize="params", metric=f"{folder / 'met.py'}:none"
    ).report.data
    count = len(nets.vectors()["x"])
    assert f"met.py:none is 0 on all {count} samples (its third argument was None" in " ".join(report["notes"])
    assert report["allocation"]["search"]["tried"][0]["loss"]["samples"] == count


def test_recurrent_layers_in_float_are_named_with_what_has_them_in_8_bits() -> None:
    rng = np.random.default_rng(0)
    sizes = {"w": (1, 96, 16), "r": (1, 96, 32)}
    weights = {name: (0.2 * rng.standard_normal(size)).astype(np.float32) for name, size in sizes.items()}
    body = "a, y = GRU<hidden_size = 32>(x, w, r)"
    model = ir.to_proto(tiny("float[S,N,16] x => float[1,N,32] y", body, weights))
    feed = {"x": rng.standard_normal((6, 8, 16)).astype(np.float32)}
    for choices, told in (
        ({"quantize": "int8", "qdq": True}, "--quantize int8 without --qdq or --target has their weights in 8 bits"),
        ({"quantize": "int8-dynamic"}, "--quantize int8 has their weights in 8 bits"),
        ({"quantize": "int8"}, ""),
    ):
        notes = onnxgrail.compress(model, data=[feed], ratio=0, check=False, **choices).report.data["notes"]
        assert [note.partition("recurrent layers stay in float, ")[2] for note in notes if "recurrent" in note] == (
            [told] if told else []
        )


def test_an_interface_that_keeps_its_sizes_is_noted() -> None:
    report = onnxgrail.compress(nets.mlp(), data=nets.vectors(), ratio=0.3, kv_io=True).report
    assert any(note.startswith("--kv-io: all inputs and outputs keep their sizes") for note in report.data["notes"])
