"""No result takes more bytes than what it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.cli import main
from onnxgrail.errors import NothingToCompressError
from onnxgrail.recipe.storage import KEY
from tests.e2e import nets
from tests.tiny import ints, tiny

QUICK: dict[str, Any] = {"unit_ratio": 0.5, "round_to": 1, "samples": 4, "check": False}
SLOPED = "h = Conv<pads=[1,1,1,1]>(x, w, b)\ns = Expand(a, to)\nr = PRelu(h, s)\ny = Conv(r, v)"
SLOPES = {"w": (32, 3, 3, 3), "b": (32,), "a": (1, 32, 1, 1), "to": ints(1, 32, 32, 32), "v": (8, 32, 3, 3)}
FILLED = (
    "w = ConstantOfShape<value: tensor = float[1] {0.1}>(ws)\nv = ConstantOfShape<value: tensor = float[1] {0.2}>(vs)\n"
    "h = MatMul(x, w)\nr = Relu(h)\ny = MatMul(r, v)"
)


def save(model: ir.Model, path: Path) -> Path:
    ir.save(model, path)
    return path


@pytest.mark.parametrize("reducer", ["prune", "fold"])
@pytest.mark.parametrize("compensate", ["none", "grail", "best"])
def test_slopes_behind_expand(compensate: str, reducer: str, tmp_path: Path) -> None:
    source = save(tiny("float[N,3,32,32] x => float[] y", SLOPED, SLOPES), tmp_path / "net.onnx")
    result = onnxgrail.compress(source, compensate=compensate, reducer=reducer, **QUICK)
    sizes = result.report.data["model"]
    assert sizes["bytes_after"] == result.output.stat().st_size < sizes["bytes_before"] == source.stat().st_size
    assert 0 < sizes["params_after"] < sizes["params_before"]


def test_what_is_predicted_is_achieved(tmp_path: Path) -> None:
    source = save(tiny("float[N,3,32,32] x => float[] y", SLOPED, SLOPES), tmp_path / "net.onnx")
    for guess in onnxgrail.inspect(source).predicted:
        done = onnxgrail.compress(source, compensate="none", force=True, unit_ratio=guess["ratio"], samples=4)
        assert done.report.data["model"]["params_after"] == guess["params"] > 0


def test_onnxslim_does_not_write_repeats_out(tmp_path: Path) -> None:
    pytest.importorskip("onnxslim")
    source = save(tiny("float[N,3,32,32] x => float[] y", SLOPED, SLOPES), tmp_path / "net.onnx")
    result = onnxgrail.compress(source, compensate="none", simplify=True, **QUICK)
    assert result.output.stat().st_size < source.stat().st_size


def filled(path: Path) -> Path:
    """Layers whose weights are one number and a shape."""
    return save(tiny("float[N,64] x => float[] y", FILLED, {"ws": ints(64, 256), "vs": ints(256, 64)}), path)


def test_a_larger_result_is_refused(tmp_path: Path) -> None:
    """A fold adds up the rows of a layer: each of its numbers would have to be written out."""
    source, output = filled(tmp_path / "net.onnx"), tmp_path / "small.onnx"
    words = ["compress", str(source), str(output), "--unit-ratio", "0.25", "--samples", "16", "--reducer", "fold"]
    done = CliRunner().invoke(main, [*words, "--report", str(tmp_path / "report.json")])
    assert done.exit_code == 4, done.output
    assert "Error: the result would take" in done.stderr
    assert f"more than the {source.stat().st_size:,} of the input" in done.stderr
    assert not output.exists()
    assert json.loads((tmp_path / "report.json").read_text())["model"]["output"] is None


@pytest.mark.parametrize("compensate", ["none", "grail", "best"])
def test_weights_that_the_file_does_not_hold_get_no_new_numbers(compensate: str, tmp_path: Path) -> None:
    source = filled(tmp_path / "net.onnx")
    result = onnxgrail.compress(source, compensate=compensate, **QUICK)
    assert result.output.stat().st_size <= source.stat().st_size + 200  # the note of how it was made
    (block,) = result.report.data["blocks"]
    assert block["kept"] == 128
    assert ("fewer numbers" in block["outcome"]["reason"]) == (compensate != "none")


def test_a_note_is_short_where_it_would_make_the_file_larger(tmp_path: Path) -> None:
    body = "h = MatMul(x, w)\nr = Relu(h)\ny = MatMul(r, v)"
    small = save(tiny("float[N,6] x => float[] y", body, {"w": (6, 8), "v": (8, 3)}), tmp_path / "small.onnx")
    large = tmp_path / "large.onnx"
    onnx.save(nets.mlp(), large)
    for source, short in ((small, True), (large, False)):
        result = onnxgrail.compress(source, compensate="none", **QUICK)
        (entry,) = json.loads(result.model.metadata_props[KEY])
        assert ("seed" not in entry["recipe"]) == short
        assert entry["recipe"]["unit_ratio"] == 0.5
        again = onnxgrail.apply(result.output, source, tmp_path / "again.onnx", force=True)
        assert again.output.read_bytes() == result.output.read_bytes()


def test_nothing_asked_for_is_never_refused() -> None:
    model = nets.mlp()
    result = onnxgrail.compress(model, unit_ratio=0, check=False)
    assert len(result.to_bytes()) < model.ByteSize() + 250


def test_weights_in_a_second_file_count_with_their_names(tmp_path: Path) -> None:
    """Every weight in a file of its own place has a name, an offset and a length in the model file."""
    layers = "\n".join(f"h{k} = MatMul(r{k}, w{k})\nr{k + 1} = Relu(h{k})" for k in range(100))
    model = tiny("float[N,18] r0 => float[N,18] r100", layers, {f"w{k}": (18, 18) for k in range(100)})
    source = save(model, tmp_path / "net.onnx")
    words: dict[str, Any] = {"samples": 4, "check": False, "round_to": 1, "compensate": "none"}
    words |= {"save_as_external_data": True, "unit_ratio": 0.06, "include": "MatMul_.[048]"}
    with pytest.raises(NothingToCompressError, match="more than the") as caught:
        onnxgrail.compress(source, tmp_path / "o.onnx", **words)
    assert "--no-save-as-external-data" in str(caught.value.hint)
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("apart", [True, False])
def test_the_size_of_a_dry_run_is_that_of_the_files(apart: bool, tmp_path: Path) -> None:
    weights = {"w1": (64, 300), "b": (300,), "w2": (300, 64)}
    source = save(
        tiny("float[N,64] x => float[N,64] y", "h = MatMul(x, w1)\na = Add(h, b)\ny = MatMul(a, w2)", weights),
        tmp_path / "net.onnx",
    )
    words: dict[str, Any] = {"unit_ratio": 0.5, "samples": 4, "check": False, "save_as_external_data": apart}
    asked = onnxgrail.compress(source, dry_run=True, **words).report.data["model"]["bytes_after"]
    done = onnxgrail.compress(source, tmp_path / "o.onnx", **words)
    files = [file for file in tmp_path.iterdir() if file.name.startswith("o.onnx")]
    assert len(files) == 1 + apart
    assert done.report.data["model"]["bytes_after"] == sum(file.stat().st_size for file in files)
    assert abs(asked - done.report.data["model"]["bytes_after"]) < 64
