"""`onnxgrail bench`."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from PIL import Image

import onnxgrail
from onnxgrail.errors import ModelError, UsageError
from tests.cli.standin import usage_error
from tests.command import run
from tests.e2e import nets
from tests.tiny import ints, tiny


@pytest.fixture
def folder(tmp_path):
    """Two nets of the same inputs and very different widths, one with other inputs, and data."""
    onnx.save(nets.mlp((16, 1500, 1500, 16)), tmp_path / "wide.onnx")
    onnx.save(nets.mlp((16, 8, 8, 16)), tmp_path / "slim.onnx")
    onnx.save(nets.convnet(), tmp_path / "other.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors(5, 16))
    return tmp_path


def test_rows_and_ratios(folder):
    words = ("bench", folder / "wide.onnx", folder / "slim.onnx", "--batch-size", "1,16", "--rounds", 30)
    result = run(*words, "--data", folder / "d.npz", "--threads", 1, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    rows = data["rows"]
    assert [(r["path"][-9:], r["batch_size"], r["rounds"]) for r in rows] == [
        (f"{name}.onnx", size, 30) for size in (1, 16) for name in ("wide", "slim")
    ]
    assert (data["threads"], data["calibration"]["samples"]) == (1, 5)  # five samples fill a batch of 16
    for wide, slim in (rows[:2], rows[2:]):
        assert wide["ratio"] is wide["ratio_interval"] is None
        assert slim["ratio"] > 2
        assert slim["ratio_interval"][0] > 1
        assert slim["hidden"] is False
        assert 0 < slim["median"] <= slim["p90"] <= slim["p99"]
        assert slim["throughput"] == pytest.approx(slim["batch_size"] / slim["median"] * 1e3)
    assert wide["bytes"] == (folder / "wide.onnx").stat().st_size


def test_table_and_notes(folder, monkeypatch):
    result = run("bench", folder / "slim.onnx", folder / "slim.onnx", "--rounds", 20, "--threads", 2)
    assert result.exit_code == 0, result.output
    assert "20 rounds, 2 threads" in result.stdout
    assert "p99 of fewer than 100 runs" in result.stderr
    single = run("bench", folder / "slim.onnx", "--seconds", "0.05", "-q")
    assert (single.exit_code, single.output) == (0, "")


def test_data_are_read_as_by_compress(tmp_path):
    onnx.save(nets.convnet(), tmp_path / "m.onnx")
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    words = ("bench", tmp_path / "m.onnx", "--rounds", 2)
    result = run(*words, "--data", tmp_path, "--image-mean", "0.5", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["calibration"]["source"] == str(tmp_path)
    assert "does nothing for random inputs" in run(*words, "--image-std", "0.5").stderr
    assert json.loads(run(*words, "--json").stdout)["calibration"]["notes"] == []  # nothing about fidelity


def test_a_model_that_does_not_take_what_is_drawn_says_what_to_do(tmp_path):
    model = nets.mlp()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"  # only twelve will do
    onnx.save(model, tmp_path / "m.onnx")
    for command in ("bench", "compare"):
        models = [tmp_path / "m.onnx"] * (1 + (command == "compare"))
        told = run(command, *models)
        assert told.exit_code == 1
        assert "The inputs are random: give --data or --input-shapes" in told.stderr


def test_a_batch_that_the_inputs_prescribe_is_told(folder):
    result = onnxgrail.bench(folder / "slim.onnx", batch_sizes=(4, 2), rounds=2, input_shapes={"x": (4, 16)})
    assert [row.batch_size for row in result.rows] == [4]
    assert result.notes[:2] == ("batches of 2 were asked for, the inputs hold 4", "inputs: x 4x16")
    alone = onnxgrail.bench(folder / "slim.onnx", rounds=2, input_shapes={"x": (4, 16)})
    assert not any("asked for" in note for note in alone.notes)


def test_the_first_axis_of_a_state_is_no_batch_size(tmp_path):
    feeds = [{"x": np.ones((1, 4), np.float32), "state": np.ones((2, 1, 4), np.float32)}]
    summed = tiny(
        "float[N,4] x, float[2,N,4] state => float[N,5] y",
        "s = ReduceSum<keepdims=0>(state, zero)\nh = Add(x, s)\ny = MatMul(h, w)",
        {"w": (4, 5), "zero": ints(0)},
    )
    result = onnxgrail.bench(ir.to_proto(summed), data=feeds, rounds=2)
    assert [row.batch_size for row in result.rows] == [1]
    assert not [note for note in result.notes if "batch" in note]


def test_each_batch_size_has_its_own_rounds(folder, monkeypatch):
    from onnxgrail.commands import bench

    counts = iter((200, 150))
    monkeypatch.setattr(bench, "take_turns", lambda sessions, *_, **__: np.ones((len(sessions), next(counts))))
    assert "200, 150 rounds" in run("bench", folder / "slim.onnx", "--batch-size", "1,4").stdout


def test_noise_is_named(folder, monkeypatch):
    from onnxgrail.commands import bench

    def alike(sessions, feeds, **limits):
        return np.random.default_rng(0).lognormal(0, 0.1, (2, 200))

    monkeypatch.setattr(bench, "take_turns", alike)
    assert "Note: noise hides the difference between" in run("bench", folder / "slim.onnx", folder / "slim.onnx").stderr


def test_misuse(folder):
    for words, message in (
        (["--batch-size", "0"], "list of sizes"),
        (["--batch-size", "a"], "list of sizes"),
        (["--seconds", "0"], "--seconds"),
        (["--rounds", "0"], "--rounds"),
        (["--device", "cpu", "--providers", "A"], "not both"),
    ):
        assert message in usage_error("bench", folder / "slim.onnx", *words)
    assert "Missing argument" in usage_error("bench")
    other = run("bench", folder / "slim.onnx", folder / "other.onnx")
    assert other.exit_code == 1
    assert "expected" in other.stderr
    for wrong in ({"batch_sizes": ()}, {"seconds": 0}, {"rounds": 0}, {"threads": 0}):
        with pytest.raises(UsageError):
            onnxgrail.bench(folder / "slim.onnx", **wrong)
    with pytest.raises(UsageError, match="no model"):
        onnxgrail.bench()
    for call in (onnxgrail.bench, lambda model: onnxgrail.compare(model, model)):
        with pytest.raises(ModelError, match="cannot read a model from int"):
            call(3)


def test_a_prescribed_batch_size_rules(tmp_path):
    model = nets.mlp((16, 8, 8, 16))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "m.onnx")
    result = onnxgrail.bench(tmp_path / "m.onnx", batch_sizes=(1, 8), rounds=3)
    assert [row.batch_size for row in result.rows] == [4]
    assert "batches of 4 only" in result.notes[0]


def test_few_rounds_have_no_interval(folder):
    models = (folder / "wide.onnx", folder / "slim.onnx")
    few, many = (onnxgrail.bench(*models, rounds=count) for count in (5, 6))
    assert few.rows[1].times.interval is None
    assert few.rows[1].times.ratio is not None
    assert many.rows[1].times.interval is not None
    assert ["fewer than 6 rounds" in " ".join(found.notes) for found in (few, many)] == [True, False]
