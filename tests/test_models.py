"""The embedded models: whole, small, runnable, as good as their manifest says, and free of the maker's traces."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from onnxgrail import models
from onnxgrail.errors import UsageError
from onnxgrail.models import _artifacts

LIMIT = 4 * 2**20
MACHINE_PATH = re.compile(rb"(?:/|\\)(?:work|root|usr|home|tmp|opt|Users)(?:/|\\)|site-packages|\.py\b")

every_model = pytest.mark.parametrize("name", models.names())


@pytest.fixture
def run_onnx() -> Any:
    """Open an ONNX file as a callable from feed to outputs."""
    runtime = pytest.importorskip("onnxruntime")

    def open_file(path: Path) -> Any:
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda feed: session.run(None, feed)

    return open_file


def arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of an npz file."""
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def files(name: str) -> tuple[Path, Path, Path]:
    """Return the three files of a model."""
    embedded = models.load(name)
    return embedded.model, embedded.calibration, embedded.heldout


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'resnet'") as caught:
        models.load("resnet")
    assert all(name in str(caught.value) for name in models.names())


def test_the_manifest_describes_exactly_the_embedded_models() -> None:
    assert set(models.manifest()) == set(models.names())


@every_model
def test_files_are_small_and_the_ones_of_the_manifest(name: str) -> None:
    digests = models.manifest()[name]["sha256"]
    assert set(digests) == {path.name for path in files(name)}
    for path in files(name):
        assert path.stat().st_size <= LIMIT
        assert _artifacts.sha256(path) == digests[path.name], path.name


@every_model
def test_the_manifest_names_script_licence_and_size(name: str) -> None:
    entry = models.manifest()[name]
    assert (Path(models.__file__).parent / entry["script"]).is_file()
    assert entry["data_licence"]
    assert entry["metric"] == models.load(name).metric
    assert entry["parameters"] == _artifacts.parameters(models.load(name).model)


@every_model
def test_the_model_is_valid_and_one_file(name: str) -> None:
    model = onnx.load(models.load(name).model, load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    assert all(weight.data_location == onnx.TensorProto.DEFAULT for weight in model.graph.initializer)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@every_model
def test_nothing_inside_tells_where_it_was_made(name: str) -> None:
    model = onnx.load(models.load(name).model)
    for weight in model.graph.initializer:
        weight.ClearField("raw_data")  # four megabytes of noise spell any short word
    assert not MACHINE_PATH.search(model.SerializeToString())


@every_model
def test_nodes_keep_the_modules_they_came_from(name: str) -> None:
    nodes = onnx.load(models.load(name).model).graph.node
    keys = {entry.key for node in nodes for entry in node.metadata_props}
    assert "pkg.torch.onnx.name_scopes" in keys
    assert "pkg.torch.onnx.stack_trace" not in keys


@every_model
def test_data_fit_the_inputs(name: str) -> None:
    embedded = models.load(name)
    inputs = {value.name: value.type.tensor_type for value in onnx.load(embedded.model).graph.input}
    calibration, heldout = arrays(embedded.calibration), arrays(embedded.heldout)
    assert set(calibration) == set(inputs)
    assert set(heldout) == {*inputs, "labels"}
    for key, kind in inputs.items():
        for data in (calibration, heldout):
            assert data[key].dtype == onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            assert data[key].ndim == len(kind.shape.dim)
        assert len(heldout[key]) == len(heldout["labels"])


@every_model
def test_calibration_and_held_out_data_share_no_sample(name: str) -> None:
    embedded = models.load(name)
    calibration, heldout = arrays(embedded.calibration), arrays(embedded.heldout)
    for key, seen in calibration.items():
        assert not {row.tobytes() for row in seen} & {row.tobytes() for row in heldout[key]}


@every_model
def test_any_batch_size_gives_the_same_answer(name: str, run_onnx: Any) -> None:
    embedded = models.load(name)
    run = run_onnx(embedded.model)
    feed = arrays(embedded.calibration)
    together = run({key: value[:3] for key, value in feed.items()})[0]
    for row in range(3):
        alone = run({key: value[row : row + 1] for key, value in feed.items()})[0]
        np.testing.assert_allclose(alone, together[row : row + 1], rtol=1e-3, atol=1e-4)


@every_model
def test_the_dense_metric_is_the_one_of_the_manifest(name: str, run_onnx: Any) -> None:
    embedded = models.load(name)
    measured = models.score(embedded, run_onnx(embedded.model))
    assert measured == pytest.approx(models.manifest()[name]["dense"], abs=1e-3)


def test_shorter_sequences_run(run_onnx: Any) -> None:
    embedded = models.load("char_llama")
    ids = arrays(embedded.calibration)["input_ids"]
    run = run_onnx(embedded.model)
    whole, prefix = run({"input_ids": ids[:2]})[0], run({"input_ids": ids[:2, :17]})[0]
    np.testing.assert_allclose(whole[:, :17], prefix, rtol=1e-3, atol=1e-4)


def test_perplexity_of_a_guess_is_the_number_of_choices_and_of_ruin_is_infinite() -> None:
    embedded = models.load("char_llama")
    guess = models.score(embedded, lambda feed: [np.zeros((*feed["input_ids"].shape, 96), np.float32)])
    assert guess == pytest.approx(96.0)
    ruin = np.full(96, 1e30, np.float32)
    ruin[0] = -1e30
    line_breaks = arrays(embedded.heldout)["labels"] == 0
    assert line_breaks.any()
    assert models.score(embedded, lambda feed: [np.tile(ruin, (*feed["input_ids"].shape, 1))]) == np.inf


def test_the_image_model_breaks_without_repair() -> None:
    # Otherwise it could not show what a repair is worth.
    entry = models.manifest()["digits_resnet"]
    assert entry["dense"] >= 0.98
    assert entry["half_inner_channels_zeroed"] <= 0.6


def test_the_vision_transformer_has_learnt_the_digits() -> None:
    assert models.manifest()["digits_vit"]["dense"] >= 0.97


def test_the_manifest_writer_keeps_other_entries(tmp_path: Path) -> None:
    file = tmp_path / "weights.onnx"
    file.write_bytes(b"weights")
    manifest = tmp_path / "manifest.toml"
    _artifacts.record("second", {"dense": 0.5, "blocks": {"conv": 1}}, [file], manifest)
    _artifacts.record("first", {"metric": "accuracy"}, [], manifest)
    _artifacts.record("second", {"dense": 0.25}, [file], manifest)
    assert tomllib.loads(manifest.read_text()) == {
        "first": {"metric": "accuracy", "sha256": {}},
        "second": {"dense": 0.25, "sha256": {file.name: _artifacts.sha256(file)}},
    }


def test_the_image_model_can_be_trained() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from onnxgrail.models import _digits, digits_resnet

    data = _digits.digits(2)
    embedded = arrays(models.load("digits_resnet").heldout)
    np.testing.assert_array_equal(data.heldout, embedded["images"])
    np.testing.assert_array_equal(data.heldout_labels, embedded["labels"])
    torch.manual_seed(0)
    model = digits_resnet.DigitsResNet(widths=(4, 8), blocks_per_stage=1)
    images, labels = (torch.from_numpy(array[:128]) for array in (data.train, data.train_labels))
    assert digits_resnet.train(model, images, labels, epochs=1) < 10.0


def test_the_vision_transformer_can_be_trained() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from onnxgrail.models import _digits, digits_vit

    data = _digits.digits()
    embedded = arrays(models.load("digits_vit").heldout)
    np.testing.assert_array_equal(data.heldout, embedded["images"])
    np.testing.assert_array_equal(data.heldout_labels, embedded["labels"])
    torch.manual_seed(0)
    model = digits_vit.DigitsViT(width=16, depth=1, heads=2, hidden=24)
    images, labels = (torch.from_numpy(array[:128]) for array in (data.train, data.train_labels))
    assert digits_vit.train(model, images, labels, epochs=1) < 10.0


def test_images_are_moved_a_little_and_surrounded_by_background() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    from onnxgrail.models import digits_vit

    images = torch.from_numpy(arrays(models.load("digits_vit").calibration)["images"])
    moved = digits_vit.moved(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert moved.min() >= -1.0 - 1e-5
    cosine = torch.nn.functional.cosine_similarity((images + 1).flatten(1), (moved + 1).flatten(1))
    assert cosine.min() > 0.3
    assert 0.7 < cosine.mean() < 0.99
    empty = torch.full((2, 1, 8, 8), -1.0)
    torch.testing.assert_close(digits_vit.moved(empty, torch.Generator().manual_seed(0)), empty)


def test_the_language_model_can_be_trained() -> None:
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from onnxgrail.models import _stdlib_text, char_llama

    torch.manual_seed(0)
    model = char_llama.CharLlama(char_llama.configuration(hidden_size=32, intermediate_size=48, num_hidden_layers=1))
    text = _stdlib_text.encode("Beautiful is better than ugly. " * 20)
    assert char_llama.train(model, text, steps=1) < 10.0


def test_text_survives_encoding_and_only_foreign_characters_are_lost() -> None:
    from onnxgrail.models import _stdlib_text

    assert _stdlib_text.decode(_stdlib_text.encode("Zen\n  of ~Python~")) == "Zen\n  of ~Python~"
    assert _stdlib_text.decode(_stdlib_text.encode("Zürich")) == "Z?rich"
