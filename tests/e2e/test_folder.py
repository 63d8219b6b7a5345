"""An exported folder: all models are compressed, the rest is copied, and nothing of full size is left in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from PIL import Image

import onnxgrail
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.errors import ModelError, OutputError, UsageError
from onnxgrail.job.exported import _scale
from tests.command import run
from tests.furniture import exported, sentences
from tests.tiny import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as Optimum and transformers.js write it, with a text to calibrate with next to it."""
    root = tmp_path / "exported"
    exported(root)
    (root / ".cache").mkdir()
    (root / ".cache" / "x").write_text("x")
    sentences(tmp_path / "text.txt")
    return root


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_all_models_of_a_folder(folder: Path) -> None:
    result = onnxgrail.compress_folder(folder, ratio=0.5, data=folder.parent / "text.txt", allocate="uniform")
    assert result.output == folder.parent / "exported.compressed"
    kept = names(result.output)
    assert [name for name in kept if not name.endswith(".data")] == [
        "config.json",
        "onnx/decoder_model.onnx",
        "onnx/encoder_model.onnx",
        "tokenizer.json",
    ]
    assert "onnx/d.data" not in kept
    assert set(result.left_out) == {"model.safetensors", "onnx/encoder_model_quantized.onnx"}
    for name, one in result.results.items():
        assert one.report.data["calibration"]["samples"] >= 30, name
        assert one.report.data["model"]["params_after"] < one.report.data["model"]["params_before"]
    ids = np.arange(12).reshape(2, 6)
    with open_session(result.output / "onnx" / "encoder_model.onnx") as session:
        states = session.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})["last_hidden_state"]
    assert states.shape == (2, 6, 16)


def test_what_the_data_do_not_fit_is_copied_with_its_weights(folder: Path) -> None:
    data = {"input_ids": np.arange(400).reshape(40, 10) % 40, "attention_mask": np.ones((40, 10), np.int64)}
    np.savez(folder.parent / "data.npz", **data)
    (folder / "onnx" / "encoder_model.onnx").rename(folder / "onnx" / "model.onnx")
    (folder / "onnx" / "encoder_model_quantized.onnx").unlink()
    result = onnxgrail.compress_folder(folder, ratio=0.5, data=str(folder.parent / "data.npz"), allocate="uniform")
    assert "encoder_hidden_states" in result.copied["onnx/decoder_model.onnx"]
    assert result.output is not None
    for name in ("decoder_model.onnx", "d.data"):
        assert (result.output / "onnx" / name).read_bytes() == (folder / "onnx" / name).read_bytes()
    assert "Copied as it is: onnx/decoder_model.onnx" in str(result)


def test_a_model_that_is_copied_keeps_its_other_formats_and_all_its_weights(tmp_path: Path) -> None:
    root, rows = tmp_path / "m", np.random.default_rng(0).normal(size=(32, 20)).astype(np.float32)
    root.mkdir()
    body = "a = MatMul(x, w)\nb = Relu(a)\ny = MatMul(b, v)"
    for name, size, more in (("fits", 20, {}), ("other", 7, {"location": "pytorch_model.bin", "size_threshold": 0})):
        model = ir.to_proto(tiny(f"float[N,{size}] x => float[N,4] y", body, {"w": (size, 64), "v": (64, 4)}))
        onnx.save(model, root / f"{name}.onnx", save_as_external_data=bool(more), **more)
        onnx.save(model, root / f"{name}_fp16.onnx")
    (root / "model.safetensors").write_bytes(b"")
    for feeds in ([{"x": rows}] * 4, iter([{"x": rows}] * 4)):
        result = onnxgrail.compress_folder(root, tmp_path / "o", data=feeds, ratio=0.3, compensate="grail", force=True)
        assert set(result.left_out) == {"fits_fp16.onnx", "model.safetensors"}
        assert list(result.copied) == ["other.onnx"]
        assert {"other.onnx", "other_fp16.onnx", "pytorch_model.bin"} < set(names(tmp_path / "o"))


@pytest.mark.parametrize(
    ("stated", "form"),
    [
        ({"do_normalize": True}, None),
        ({"size": {"height": 8, "width": 8}}, ["stretch"]),
        ({"size": 8, "do_flip_channel_order": True}, ["bgr", "stretch"]),
        ({"size": {"shortest_edge": 8}, "do_center_crop": True, "do_flip_channel_order": True}, ["bgr"]),
        ({"size": {"height": 8, "width": 8}, "do_center_crop": True}, None),
    ],
)
def test_what_the_image_processor_does(tmp_path: Path, stated: dict[str, Any], form: list[str] | None) -> None:
    root = tmp_path / "vision"
    root.mkdir()
    body = "c = Conv<kernel_shape=[3,3]>(pixel_values, w)\nr = Relu(c)\ny = Conv<kernel_shape=[1,1]>(r, v)"
    model = tiny("float[N,3,8,8] pixel_values => float[] y", body, {"w": (16, 3, 3, 3), "v": (4, 16, 1, 1)})
    ir.save(model, root / "model.onnx")
    stated = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2], **stated}
    (root / "preprocessor_config.json").write_text(json.dumps(stated))
    photos = tmp_path / "photos"
    photos.mkdir()
    for n in range(8):
        Image.fromarray(np.random.default_rng(n).integers(0, 255, (9, 9, 3), np.uint8)).save(photos / f"{n}.png")
    result = onnxgrail.compress_folder(root, ratio=0.5, data=photos, allocate="uniform", dry_run=True)
    recipe = result.results["model.onnx"].report.data["recipe"]
    assert (recipe["image_mean"], recipe["image_form"]) == ([0.5, 0.4, 0.3], form)
    said = run("compress", root, "--ratio=0.5", "--data", photos, "--allocate=uniform", "--dry-run", "--json")
    assert json.loads(said.stdout)["models"]["model.onnx"]["recipe"]["image_form"] == form
    assert not (tmp_path / "vision.compressed").exists()


@pytest.mark.parametrize(
    "stated",
    [
        {"do_rescale": False, "image_mean": [127.5, 63.75, 0], "image_std": [255, 51, 25.5]},
        {"rescale_factor": 1 / 127.5, "image_mean": [1, 0.5, 0], "image_std": [2, 0.4, 0.2]},
        {"rescale_factor": 1 / 127.5, "do_normalize": False, "image_mean": 7},
        {"rescale_factor": 0.00392156862745098, "image_std": 0.25},
        {"rescale_factor": "1/255", "image_mean": 0.5},
    ],
)
def test_pixels_are_scaled_as_the_image_processor_does(stated: dict[str, Any]) -> None:
    """Numbers of a processor, of pixels in 0..255, against ours, of pixels in 0..1."""
    pixels = np.array([0.0, 100.0, 255.0])
    found = _scale(stated)
    ours = (pixels / 255 - found.get("image_mean", 0)) / found.get("image_std", 1)
    factor = stated.get("rescale_factor", 1 / 255) if stated.get("do_rescale", True) else 1
    scaled = pixels * (1 / 255 if factor == "1/255" else factor)
    if stated.get("do_normalize", True):
        scaled = (scaled - stated.get("image_mean", 0)) / stated.get("image_std", 1)
    np.testing.assert_allclose(ours, scaled, rtol=1e-6, atol=1e-9)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="for one model"):
        onnxgrail.compress_folder(folder, ratio=0.5, report="r.json")
    with pytest.raises(UsageError, match="kv-io"):
        onnxgrail.compress_folder(folder, ratio=0.5, kv_io=True)
    for output in (folder, folder / "in", folder.parent):
        with pytest.raises(OutputError, match="contains the input or lies in it"):
            onnxgrail.compress_folder(folder, output, ratio=0.5)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="exists"):
        onnxgrail.compress_folder(folder, tmp_path / "full", ratio=0.5)
    with pytest.raises(ModelError, match=r"no \.onnx"):
        onnxgrail.compress_folder(tmp_path / "full", ratio=0.5)


def test_links_to_files_elsewhere_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    (folder / "onnx" / "decoder_model.onnx").unlink()
    result = onnxgrail.compress_folder(folder, ratio=0.5, data=folder.parent / "text.txt", allocate="uniform")
    assert result.output is not None
    assert "notes.txt" not in names(result.output)


def test_weights_elsewhere_are_not_copied(folder: Path, tmp_path: Path) -> None:
    """A model that names a file above the folder is refused."""
    path = folder / "onnx" / "decoder_model.onnx"
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../../secret" if entry.key == "location" else entry.value
    path.write_bytes(proto.SerializeToString())
    (tmp_path / "secret").write_bytes(bytes(2**16))
    target = tmp_path / "one" / "two"
    with pytest.raises(ModelError, match="secret"):
        onnxgrail.compress_folder(folder, target, ratio=0.5, data=tmp_path / "text.txt", allocate="uniform")
    assert not [name for name in names(tmp_path / "one") if "secret" in name]


def test_the_command_takes_a_folder(folder: Path) -> None:
    asked = ["--ratio", "0.5", "--allocate", "uniform", "--data", folder.parent / "text.txt"]
    done = run("compress", folder, folder.parent / "small", *asked, "--json")
    assert done.exit_code == 0, done.stderr
    assert set(json.loads(done.stdout)["models"]) == {"onnx/encoder_model.onnx", "onnx/decoder_model.onnx"}
    done = run("compress", folder, folder.parent / "small", *asked, "--force")
    assert "Left out: model.safetensors" in done.stdout
