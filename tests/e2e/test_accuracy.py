"""Accuracy and latency of trained models at each step on the way to a server, by labels of every kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.cli import main
from onnxgrail.core import Feed
from onnxgrail.graph.io.serial import to_bytes
from tests.shorter import shorter
from tests.tiny import tiny

from . import nets

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")


def run(*words: object) -> Any:
    return CliRunner().invoke(main, [str(word) for word in words])


def score(name: str, path: Path) -> float:
    """Of a model on the held-out data, by the judge of the demo."""
    embedded = models.load(name)

    def outputs(feed: Feed) -> list[Any]:
        return list(session.run(feed).values())

    with open_session(path) as session:
        return models.score(embedded, outputs)


def heldout(name: str, count: int | None = None) -> dict[str, Any]:
    with np.load(models.load(name).heldout) as archive:
        return {key: archive[key][:count] for key in archive.files}


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits ResNet, cut so hard that it errs."""
    path = tmp_path_factory.mktemp("slim") / "slim.onnx"
    digits = models.load("digits_resnet")
    choices: dict[str, Any] = {"unit_ratio": 0.7, "compensate": "grail", "check": False, "samples": 64}
    onnxgrail.compress(digits.model, path, data=digits.calibration, **choices)
    return path


def shown(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def test_each_step_of_the_page_tells_accuracy_and_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = shorter("digits_resnet", tmp_path)
    places = {"model.onnx": digits.model, "calib.npz": digits.calibration, "heldout.npz": digits.heldout}
    section = PAGE.split("## Quantize", 1)[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    lines = block[1].splitlines()[:3]
    assert [line.split()[1] for line in lines] == ["compress", "compress", "compare"]
    texts = []
    for line in lines:
        words = [places.get(word, word) for word in line.split()[1:]]
        done = run(*words, *(["--samples", "96", "--allocate", "uniform"] if words[0] == "compress" else []))
        assert done.exit_code == 0, done.output
        assert "Latency of one run" in done.stdout
        texts.append(done.stdout)
    dense, narrow, int8 = (
        shown(score("digits_resnet", path)) for path in (digits.model, Path("narrow.onnx"), Path("int8.onnx"))
    )
    assert "output logits on 400 held-out samples" in texts[0]
    assert re.search(rf"^Output logits: .*, top-1 {dense} -> {narrow}$", texts[0], re.MULTILINE)
    assert "original" in texts[0].split("Latency", 1)[1]
    assert re.search(rf"^Output logits, quantized: .*, top-1 {dense} -> {int8}$", texts[1], re.MULTILINE)
    assert "quantized 0." in texts[1].split("Latency", 1)[1]
    row = next(line for line in texts[2].splitlines() if line.strip().startswith("logits"))
    assert row.rstrip().endswith(f"{dense}  {int8}")


def arrays(_: Path) -> Any:
    return heldout("digits_resnet", 60)


def archive(folder: Path) -> Any:
    np.savez(folder / "d.npz", **heldout("digits_resnet", 60))
    return folder / "d.npz"


def archives(folder: Path) -> Any:
    for number in range(2):
        rows = slice(30 * number, 30 * number + 30)
        np.savez(folder / f"{number}.npz", **{key: a[rows] for key, a in heldout("digits_resnet", 60).items()})
    return folder


def feeds(_: Path) -> Any:
    given = heldout("digits_resnet", 60)
    return [{key: array[start : start + 7] for key, array in given.items()} for start in range(0, 60, 7)]


def pictures(folder: Path) -> Any:
    from PIL import Image

    given = heldout("digits_resnet", 60)
    for number, (image, label) in enumerate(zip(given["images"], given["labels"], strict=True)):
        (folder / f"digit {label}").mkdir(exist_ok=True)
        pixels = ((image[0] + 1) / 2 * 255).round().astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"digit {label}" / f"{number}.png")
    return folder


def dataset(folder: Path) -> Any:
    pa = pytest.importorskip("pyarrow")
    given = heldout("digits_resnet", 60)
    table = pa.table({"images": given["images"].tolist(), "label": given["labels"]})
    images = table.column("images").cast(pa.list_(pa.list_(pa.list_(pa.float32()))))
    table = table.set_column(0, "images", images)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder


@pytest.mark.parametrize("make", [arrays, archive, archives, feeds, pictures, dataset])
def test_labels_of_every_kind(make: Callable[[Path], Any], slim: Path, tmp_path: Path) -> None:
    given = heldout("digits_resnet", 60)
    expected = []
    for path in (models.load("digits_resnet").model, slim):
        with open_session(path) as session:
            (logits,) = session.run({"images": given["images"]}).values()
        expected.append(float((logits.argmax(axis=1) == given["labels"]).mean()))
    assert expected[1] < expected[0]
    scale: dict[str, Any] = {"image_mean": 0.5, "image_std": 0.5} if make is pictures else {}
    (found,) = onnxgrail.compare(models.load("digits_resnet").model, slim, data=make(tmp_path), **scale).outputs
    assert (found.judged, found.top1_reference) == (60, pytest.approx(expected[0]))
    assert found.top1 == pytest.approx(expected[1])


def test_chosen_samples_keep_their_labels(slim: Path) -> None:
    """Of data sorted by class, every draw has other samples."""
    given = heldout("digits_resnet")
    order = np.argsort(given["labels"], kind="stable")
    data = {key: array[order] for key, array in given.items()}
    found = onnxgrail.compare(models.load("digits_resnet").model, slim, data=data, samples=50, batch_size=7)
    assert found.outputs[0].judged == 50
    assert found.outputs[0].top1_reference is not None
    assert found.outputs[0].top1_reference > 0.95


def test_folders_of_something_else_are_no_classes(slim: Path, tmp_path: Path) -> None:
    pictures(tmp_path)
    for number in range(5, 10):
        (tmp_path / f"digit {number}").rename(tmp_path / "digit 0" / str(number))
    scale: dict[str, Any] = {"image_mean": 0.5, "image_std": 0.5}
    (found,) = onnxgrail.compare(models.load("digits_resnet").model, slim, data=tmp_path, **scale).outputs
    assert (found.judged, found.top1) == (0, None)


def test_without_labels_nothing_is_told(slim: Path) -> None:
    digits = models.load("digits_resnet")
    done = run("compare", digits.model, slim, "--data", digits.calibration, "--samples", 16)
    assert done.exit_code == 0
    assert "top-1 agreement" in done.stdout
    assert "top-1 A" not in done.stdout
    assert " -> " not in done.stdout
    assert "Latency" not in done.stdout
    assert json.loads(run("compare", digits.model, slim, "--samples", 8, "--json").stdout)["latency"] is None


def test_perplexity_of_texts() -> None:
    """By labels as the demo has it, and by the tokens themselves where there are none."""
    llama = models.load("char_llama").model
    given = heldout("char_llama", 8)
    (labelled,) = onnxgrail.compare(llama, llama, data=given).outputs
    (read,) = onnxgrail.compare(llama, llama, data={"input_ids": given["input_ids"]}).outputs
    with open_session(llama) as session:
        (logits,) = session.run({"input_ids": given["input_ids"]}).values()
    chances = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    picked = np.log(np.take_along_axis(chances, given["labels"][..., None], axis=-1)[..., 0])
    assert labelled.perplexity == labelled.perplexity_reference == pytest.approx(np.exp(-picked.mean()), rel=1e-4)
    assert read.perplexity == pytest.approx(np.exp(-picked[:, :-1].mean()), rel=1e-4)
    assert (labelled.judged, read.judged) == (picked.size, picked[:, :-1].size)
    (drawn,) = onnxgrail.compare(llama, llama, samples=4).outputs
    assert drawn.perplexity is None


def test_a_model_that_fills_in_blanks_predicts_nothing(tmp_path: Path) -> None:
    """In one of two models each position sees the mean of all."""
    rng = np.random.default_rng(0)
    table, data = rng.standard_normal((9, 9)).astype(np.float32), {"input_ids": rng.integers(0, 9, (6, 5))}
    told = []
    for other in ("m", "x"):
        body = f"x = Gather(e, input_ids)\nm = ReduceMean <axes = [1]> (x)\nlogits = Add(x, {other})"
        model = tiny("int64[N,S] input_ids => float[N,S,9] logits", body, {"e": table}, opset=17)
        (tmp_path / "m.onnx").write_bytes(to_bytes(model))
        told.append(onnxgrail.compare(tmp_path / "m.onnx", tmp_path / "m.onnx", data=data).outputs[0].perplexity)
    assert told[0] is None
    assert told[1] is not None


def test_calibration_does_not_depend_on_labels() -> None:
    given = nets.vectors()
    labels = {"labels": np.zeros(len(given["x"]), np.int64)}
    common: dict[str, Any] = {"ratio": 0.3, "compensate": "grail", "dry_run": True}
    one, two = (onnxgrail.compress(nets.mlp(), data={**given, **more}, **common) for more in ({}, labels))
    assert one.to_bytes() == two.to_bytes()


@pytest.mark.parametrize("batch", [1, 8, 400])
def test_labels_count_alike_in_batches_of_every_size(batch: int, slim: Path) -> None:
    given = heldout("digits_resnet", 400)
    some = np.arange(400) % 9 == 0

    def judged(labels: Any) -> tuple[int, float | None, tuple[str, ...]]:
        data = {"images": given["images"], "labels": labels}
        found = onnxgrail.compare(models.load("digits_resnet").model, slim, data=data, batch_size=batch)
        return found.outputs[0].judged, found.outputs[0].top1, tuple(found.calibration["notes"][1:])

    whole = judged(np.where(some, -1, given["labels"]))
    assert whole[0] == 400 - some.sum()
    assert judged(np.where(some, 255, given["labels"])) == whole
    assert judged(np.where(some, 255, given["labels"]).astype(np.uint8)) == whole
    top1 = judged(given["labels"] + (given["labels"] == 9))
    assert top1[:2] == (0, None)
    assert (
        "the labels were not used: they go up to 10, and no output is known to have a row of at least 11 scores"
        in top1[2][0]
    )


def test_unused_labels_are_noted_in_a_report(tmp_path: Path) -> None:
    digits, given = models.load("digits_resnet"), heldout("digits_resnet", 64)
    data = {"images": given["images"], "labels": given["labels"] + 1}
    choices: dict[str, Any] = {"data": data, "unit_ratio": 0.5, "compensate": "none"}
    report = onnxgrail.compress(digits.model, tmp_path / "o.onnx", **choices).report.data
    assert [note for note in report["notes"] if note.startswith("the labels were not used: ")]


@pytest.mark.parametrize("shift", [0, 1])
def test_labels_that_are_met_by_chance_are_noted(shift: int, tmp_path: Path) -> None:
    digits, given = models.load("digits_resnet"), heldout("digits_resnet", 64)
    data = {"images": given["images"], "labels": np.roll(given["labels"], shift)}
    slim = tmp_path / "o.onnx"
    choices: dict[str, Any] = {"unit_ratio": 0.5, "compensate": "none", "held_out": 40}
    report = onnxgrail.compress(digits.model, slim, data=data, **choices).report.data
    noted = [note for note in report["notes"] if "as if by chance: are data and labels right?" in note]
    compared = onnxgrail.compare(digits.model, slim, data=data).calibration["notes"]
    assert len(noted) == sum("as if by chance" in note for note in compared) == shift


def test_labels_of_tokens_do_not_make_a_tagger_predict_tokens() -> None:
    """A model that looks at later tokens, too, and has a class for every token."""
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.standard_normal((40, 16)),
        "w": rng.standard_normal((16, 32)),
        "v": rng.standard_normal((32, 4)),
    }
    body = """
        e = Gather(table, ids)
        one = Constant<value_ints = [1]>()
        m = ReduceMean(e, one)
        a = Add(e, m)
        h = MatMul(a, w)
        r = Relu(h)
        logits = MatMul(r, v)
    """
    made = {name: array.astype(np.float32) for name, array in weights.items()}
    model = ir.to_proto(tiny("int64[N,S] ids => float[N,S,4] logits", body, made))
    slim = onnxgrail.compress(model, ratio=0.5).model
    data = {"ids": rng.integers(0, 40, (64, 12))}
    labels = rng.integers(0, 4, (64, 12))
    without, found = (
        onnxgrail.compare(model, slim, data={**data, **more}).outputs[0] for more in ({}, {"labels": labels})
    )
    assert [one.kind for one in found.verdicts] == [one.kind for one in without.verdicts] == ["scores"]
    assert (without.judged, found.judged) == (0, labels.size)
