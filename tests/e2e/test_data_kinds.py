"""Every kind of calibration data compresses a trained model with one command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper

from onnxgrail import models
from onnxgrail.cli import main
from tests.command import said
from tests.unit import samples

MODEL = {name: str(models.load(name).model) for name in models.names()}
SCALE = ["--image-mean", "0.5", "--image-std", "0.5"]
SOURCE = """
import numpy as np
def feeds():
    for n in range(3):
        yield {"images": np.full((2, 1, 8, 8), n / 3, np.float32)}
def fails():
    raise RuntimeError("mine")
def leaves():
    raise SystemExit(3)
def talks():
    print("on stdout")
    for feed in feeds():
        print("and later")
        yield feed
"""


def calibration(name: str, count: int = 4) -> dict[str, Any]:
    with np.load(models.load(name).calibration) as archive:
        return {key: archive[key][:count] for key in archive.files}


def letters(folder: Path) -> list[str]:
    """A text, and the tokenizer of characters that the language model was trained with."""
    rows = calibration("char_llama", 8)["input_ids"]
    alphabet = "\n" + "".join(map(chr, range(32, 127)))
    (folder / "text.txt").write_text("".join(alphabet[n] for n in rows.ravel()))
    samples.characters(folder / "tokenizer.json", {letter: n for n, letter in enumerate(alphabet)})
    return ["text.txt", "--tokenizer", "tokenizer.json", "--sequence-length", "24", "--samples", "4"]


def archive(folder: Path) -> list[str]:
    np.savez(folder / "d.npz", **calibration("digits_resnet"))
    return ["d.npz"]


def array(folder: Path) -> list[str]:
    np.save(folder / "d.npy", calibration("digits_vit")["images"])
    return ["d.npy"]


def pictures(folder: Path) -> list[str]:
    samples.images(folder / "images", 4)
    return ["images", *SCALE]


def protobufs(folder: Path) -> list[str]:
    for number in range(2):
        place = folder / "sets" / f"test_data_set_{number}"
        place.mkdir(parents=True)
        tensor = numpy_helper.from_array(calibration("digits_vit", 2)["images"], "images")
        (place / "input_0.pb").write_bytes(tensor.SerializeToString())
    return ["sets"]


def function(folder: Path) -> list[str]:
    (folder / "mine.py").write_text(SOURCE)
    return ["mine.py:feeds"]


def polygraphy(folder: Path) -> list[str]:
    samples.polygraphy(folder / "d.json", [calibration("digits_vit", 2)] * 2)
    return ["d.json"]


def dataset(folder: Path) -> list[str]:
    rows = calibration("char_llama")["input_ids"][:, :24]
    samples.dataset(folder / "saved", {"input_ids": rows.tolist(), "label": [0] * len(rows)})
    return ["saved"]


ROWS: dict[str, tuple[str, Callable[[Path], list[str]], int]] = {
    "npz": ("digits_resnet", archive, 4),
    "npy": ("digits_vit", array, 4),
    "images": ("digits_vit", pictures, 4),
    "images, convolutions": ("digits_resnet", pictures, 4),
    "text": ("char_llama", letters, 4),
    "test_data_set": ("digits_vit", protobufs, 4),
    "function": ("digits_vit", function, 6),
    "Polygraphy": ("digits_vit", polygraphy, 4),
    "saved data set": ("char_llama", dataset, 4),
}


def compress(model: str, *words: str) -> Result:
    # What is tested is the way of the data: the cheapest fit will do.
    cheap = ["--compensate", "grail", "--blocks", "mlp,conv", "--allocate", "uniform"]
    return CliRunner().invoke(main, ["compress", MODEL[model], "o.onnx", "--ratio=0.3", "--json", *cheap, *words])


@pytest.mark.parametrize("name", ROWS)
def test_one_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, make, count = ROWS[name]
    words = make(tmp_path)
    result = compress(model, "--data", *words)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["calibration"]["samples"] == count
    assert report["calibration"]["source"] == words[0]
    assert not report["calibration"]["synthetic"]
    assert report["model"]["params_after"] < report["model"]["params_before"]
    onnx.checker.check_model(tmp_path / "o.onnx")


@pytest.mark.parametrize("held", [False, True])
def test_settings_count_for_the_source_that_they_are_for(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = [*pictures(tmp_path)[:1], *archive(tmp_path)][:: -1 if held else 1]
    refused = compress("digits_resnet", "--data", "d.npz", "--held-out", "d.npz", *SCALE)
    assert refused.exit_code == 2
    assert "--image-mean does nothing for" in refused.stderr
    result = compress("digits_resnet", "--data", first, "--held-out", second, *SCALE)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["verification"]["held_out"]["samples"] == 4


def test_compare_reads_the_same_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model, make in (("digits_vit", pictures), ("char_llama", letters)):
        words = ["compare", MODEL[model], MODEL[model], "--data", *make(tmp_path), "--min-cosine", "0.99"]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.stderr


def test_what_the_users_code_prints_stays_out_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function(tmp_path)
    result = compress("digits_vit", "--data", "mine.py:talks")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["calibration"]["samples"] == 6
    assert said(result.stderr).startswith("on stdout\nand later\n")


def empty(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return ["empty"]


def broken_image(folder: Path) -> list[str]:
    words = pictures(folder)
    (folder / "images" / "2.png").write_bytes(b"\x89PNG broken")
    return words


def broken_json(folder: Path) -> list[str]:
    (folder / "d.json").write_text('[{"images": {')
    return ["d.json"]


def wrong_dtype(folder: Path) -> list[str]:
    np.savez(folder / "d.npz", images=calibration("digits_vit")["images"].astype(np.float64))
    return ["d.npz"]


def wrong_shape(folder: Path) -> list[str]:
    np.savez(folder / "d.npz", images=np.zeros((4, 1, 8, 9), np.float32))
    return ["d.npz"]


def pickled(folder: Path) -> list[str]:
    np.save(folder / "d.npy", np.array([{}]), allow_pickle=True)
    return ["d.npy"]


def raising(folder: Path) -> list[str]:
    function(folder)
    return ["mine.py:fails"]


def leaving(folder: Path) -> list[str]:
    function(folder)
    return ["mine.py:leaves"]


def other_tokenizer(folder: Path) -> list[str]:
    samples.characters(folder / "tokenizer.json", {chr(97 + n): 90 + n for n in range(26)})
    (folder / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 9)
    return ["text.txt", "--tokenizer", "tokenizer.json"]


SIGNATURE = "images float32[batch, 1, 8, 8]"
BAD: dict[str, tuple[str, Callable[[Path], list[str]], tuple[str, ...]]] = {
    "empty folder": ("digits_vit", empty, ("nothing to calibrate with", "a folder of images")),
    "wrong dtype": ("digits_vit", wrong_dtype, ("got float64, expected float32", SIGNATURE)),
    "wrong shape": ("digits_vit", wrong_shape, ("got 9 at axis 3", SIGNATURE)),
    "broken image": ("digits_vit", broken_image, ("2.png",)),
    "broken JSON": ("digits_vit", broken_json, ("cannot read 'd.json'",)),
    "pickled npy": ("digits_vit", pickled, ("pickled objects are never loaded",)),
    "function that raises": ("digits_vit", raising, ("mine.py:fails raised RuntimeError: mine",)),
    "function that ends the program": ("digits_vit", leaving, ("mine.py:leaves raised SystemExit: 3",)),
    "other tokenizer": ("char_llama", other_tokenizer, ("ids up to 115, the model's table has 96 rows",)),
    "text without tokenizer": ("char_llama", lambda f: letters(f)[:1], ("Give --tokenizer FILE",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, make, texts = BAD[name]
    result = compress(model, "--data", *make(tmp_path))
    assert result.exit_code == 1, result.stderr
    assert said(result.stderr).startswith("Error: ")
    assert said(result.stderr).count("\n") == 1
    for text in texts:
        assert text in result.stderr
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--image-mean", "a"], "'a' is not a number"),
        (["--image-mean", "nan"], "'nan' is not a number"),
        (["--image-std", "0"], "image_std must be above 0"),
        (["--image-mean", "127.5"], "image_mean is for pixels in 0..1, got 127.5. Divide by 255: 0.5"),
        (["--sequence-length", "0"], "--sequence-length"),
        (["--sequence-length", str(2**31)], "sequence_length must be from 1 to"),
        (["--tokenizer", "t.json"], "--tokenizer does nothing for random inputs"),
    ],
)
def test_bad_options(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = compress("digits_vit", *words)
    assert result.exit_code == 2
    assert text in result.stderr
