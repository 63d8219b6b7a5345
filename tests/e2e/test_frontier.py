"""The frontier: nested points with losses and costs, each of which can be written as a file."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.errors import NothingToCompressError, OutputError, UsageError
from onnxgrail.fidelity.measures import SCALES
from onnxgrail.report.frontier import measured, named
from tests.command import run
from tests.judging import killed, recorded
from tests.tiny import two_mlps

DATA = {"x": np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)}
CHOICES: dict[str, Any] = {"data": DATA, "round_to": 1, "minimize": "params"}
POINT = {"number", "predicted", "loss", "params", "macs", "bytes", "latency_ms", "command", "widths", "bits"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of 48 and 32 neurons that feed scores of classes."""
    path = tmp_path_factory.mktemp("frontier") / "m.onnx"
    onnx.save(ir.to_proto(two_mlps(12, 48, 32)), path)
    return path


@pytest.fixture(scope="module")
def found(model: Path) -> onnxgrail.Frontier:
    return onnxgrail.frontier(model, **CHOICES)


def test_all_outputs_that_decide_are_named(found: onnxgrail.Frontier) -> None:
    every = [dataclasses.asdict(point.loss) for point in found.points]
    loss = {**every[0], "output": "c", "name": "share", "scale": 1, "agreement": {"counted": False, "measure": "NMSE"}}
    name = f"{every[0]['scale']:g} x {every[0]['name']} of output y"
    assert measured(every) == found.measured == ("agreement", f"{name} on 64 samples")
    assert measured([loss, *every]) == ("agreement", f"share of output c or {name} on 64 samples")
    assert measured([{**loss, "output": "", "samples": 1}]) == ("NMSE", "share on 1 sample")


@pytest.mark.parametrize(("held", "told"), [(0, "of which fits have seen some"), (1, "that no fit has seen")])
def test_samples_that_fits_have_seen_are_named(held: int, told: str, model: Path, tmp_path: Path) -> None:
    for seed, name in ((0, "0.npz"), (1, "1.npz")):
        np.savez(tmp_path / name, x=np.random.default_rng(seed).standard_normal((32, 12)).astype(np.float32))
    files = ["--data", str(tmp_path / "0.npz"), "--held-out", str(tmp_path / f"{held}.npz")]
    result = run("frontier", str(model), *files, "--points", "1", "--minimize", "params")
    assert result.exit_code == 0
    assert f"on 32 samples {told};" in " ".join(result.stdout.split())
    assert ("fits have seen them" in result.stderr) is (held == 0)


def test_several_processes_do_not_do_the_same(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("frontier", str(model), "--data", str(tmp_path / "d.npz"))
    assert (result.exit_code, "frontier runs in one process" in result.stderr) == (2, True)


def test_points_are_nested_and_evenly_spread(found: onnxgrail.Frontier) -> None:
    costs = [found.before, *(point.costs for point in found.points)]
    assert [point.number for point in found.points] == list(range(1, 11))
    for one, two in zip(found.points, found.points[1:], strict=False):
        assert all(two.widths[name] <= width for name, width in one.widths.items())
        assert one.widths != two.widths
        assert one.predicted <= two.predicted
    steps = -np.diff([cost.params for cost in costs])
    assert steps.min() > 0
    assert steps.max() < 3 * steps.mean()
    assert found.points[-1].loss.bound <= 0.3


def test_a_picked_point_is_what_compress_and_apply_write(model: Path, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "point99.yaml").touch()
    found = onnxgrail.frontier(model, tmp_path / "f.onnx", pick=4, save_recipes=tmp_path / "r", **CHOICES)
    assert "recipes of an earlier run stay: point99.yaml" in found.notes
    (tmp_path / "r" / "point99.yaml").unlink()
    found.pick("4", tmp_path / "p.onnx")
    widths = found.points[3].widths
    done = onnxgrail.compress(model, tmp_path / "c.onnx", data=DATA, round_to=1, compensate="grail", widths=widths)
    onnxgrail.apply(tmp_path / "r" / "point4.yaml", model, tmp_path / "a.onnx", data=DATA)
    one, *others = [(tmp_path / f"{name}.onnx").read_bytes() for name in "fpca"]
    assert all(other == one for other in others)
    sizes = done.report.data["model"]
    assert (sizes["params_after"], sizes["macs_after"]) == (found.points[3].costs.params, found.points[3].costs.macs)
    assert len(list((tmp_path / "r").iterdir())) == len(found.points)
    with pytest.raises(OutputError, match="exists"):
        found.pick(4, tmp_path / "f.onnx")


@pytest.mark.parametrize("only", [{}, {"only_bits": True}, {"only_widths": True}])
def test_points_by_size_lower_bits_beside_widths(only: dict[str, Any], tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(ir.to_proto(two_mlps(12, 192, 128)), model)
    choices = {"data": DATA, "round_to": 1, "minimize": "size", "points": 5, **only}
    found = onnxgrail.frontier(model, tmp_path / "f.onnx", pick=2, save_recipes=tmp_path / "r", **choices)
    for one, two in zip(found.points, found.points[1:], strict=False):
        assert all(two.widths[name] <= width for name, width in one.widths.items())
        assert all(two.bits[name] <= bits for name, bits in one.bits.items())
        assert two.costs.bytes < one.costs.bytes
    point = found.points[1]
    assert (min(point.bits.values(), default=32) < 32) != ("only_widths" in only)
    assert not ("only_bits" in only and point.costs.params < found.before.params)
    found.pick(2, tmp_path / "p.onnx")
    onnxgrail.apply(tmp_path / "r" / "point2.yaml", model, tmp_path / "a.onnx", data=DATA)
    one, *others = [(tmp_path / f"{name}.onnx").read_bytes() for name in "fpa"]
    assert all(other == one for other in others)
    assert 0 <= len(one) - point.costs.bytes < 3000  # the recipe in the file
    assert found.written is not None
    entries = (found.written.report.data["quantization"] or {}).get("matrices", [])
    assert {e["weight"]: e["bits"] for e in entries} == {n: b for n, b in point.bits.items() if b < 32}
    loss = onnxgrail.compare(model, tmp_path / "f.onnx", data=DATA).outputs[0].verdicts[0].loss
    assert loss is not None
    assert SCALES["classes"] * loss <= point.loss.bound


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"bits": {"w1": 8}, "ratio": 0.2}, "bits need widths, and no --quantize"),
        ({"bits": {"w1": 8}, "widths": {}, "quantize": "int4"}, "bits need widths, and no --quantize"),
        ({"bits": {"w11": 8}, "widths": {}}, r"bits name 'w11', which is no weight .*Did you mean 'w1'"),
        ({"bits": {"w1": 5}, "widths": {}}, r"bits give the weight 'w1' 5 bits\. It can have 16, 8, 4 or 32"),
        ({"bits": {"w1": "x"}, "widths": {}}, "bits is .*, expected names with whole numbers"),
    ],
)
def test_wrong_bits_are_usage_errors(choices: dict[str, Any], text: str, tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(ir.to_proto(two_mlps(12, 192, 128)), model)
    with pytest.raises(UsageError, match=text):
        onnxgrail.compress(model, tmp_path / "o.onnx", data=DATA, **choices)


def test_a_loss_picks_the_smallest_point_within_it(found: onnxgrail.Frontier) -> None:
    for point in found.points:
        chosen = found.point(f"{100 * point.loss.bound + 1e-7:.9f}%")
        assert chosen.loss.bound <= point.loss.bound + 1e-9
        assert chosen.number >= point.number
    with pytest.raises(NothingToCompressError, match=r"no point has a loss of at most 0.0001%.*1 \("):
        found.point(1e-6)
    with pytest.raises(UsageError, match=r"there is no point 11\. Points, .*10 \("):
        found.point(11)


def test_json_and_page_say_the_same(found: onnxgrail.Frontier, tmp_path: Path) -> None:
    found.save(tmp_path / "f.json")
    found.save(tmp_path / "f.html")
    data = json.loads((tmp_path / "f.json").read_text())
    assert data["schema"] == 1
    assert set(data["model"]) == {"input", "params", "macs", "bytes", "latency_ms"}
    assert all(set(point) == POINT for point in data["points"])
    page = (tmp_path / "f.html").read_text(encoding="utf-8")
    assert page.count('data-shows="command-3"') == page.count("<h3>") - len(data["points"])  # one dot per plot
    assert not re.search(r"\son\w+=|\sstyle=|(src|href)=\"(?!#)", page)
    assert "default-src &#x27;none&#x27;" in page
    for point in data["points"]:
        number = point["number"]
        assert f'id="command-{number}"' in page
        assert f'id="point-{number}"' in page
        assert re.search(rf'<a href="#point-{number}" aria-label="Point {number}: loss ', page)


def test_the_command_of_a_point_writes_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", **DATA)
    words = ["--data", tmp_path / "d.npz", "--round-to", 1, "--minimize", "macs", "--points", 3]
    done = run("frontier", model, *words, "--save-recipes", tmp_path / "r", "--json", "-q")
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path)
    commands = [point["command"] for point in json.loads(done.stdout)["points"]]
    for number, command in enumerate(commands, 1):
        assert run(*shlex.split(command)[1:]).exit_code == 0
        assert model.with_name(f"m.point{number}.onnx").exists()
    plain = run("frontier", model, tmp_path / "o.onnx", *words, "--pick", 2)
    assert plain.exit_code == 0, plain.output
    assert (tmp_path / "o.onnx").read_bytes() == model.with_name("m.point2.onnx").read_bytes()
    assert "\nPoint 2: loss " in plain.stdout
    assert "Written: " in plain.stdout


def test_the_command_without_recipes_finds_the_same_points(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **DATA)
    words = ["--data", tmp_path / "d.npz", "--minimize", "macs", "--points", 3, "--most-loss", "20%"]
    done = run("frontier", model, *words, "--json", "-q")
    assert done.exit_code == 0, done.output
    point = json.loads(done.stdout)["points"][1]
    assert "--points 3 --most-loss 0.2 --pick 2" in point["command"]
    again = run(*shlex.split(point["command"])[1:], "--force", "--json", "-q")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["points"][1]["widths"] == point["widths"]


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"data": None}, "frontier needs --data"),
        ({"ratio": 0.3}, "a frontier has many amounts, and takes no ratio"),
        ({"widths": {"a": 3}}, "a frontier has many amounts, and takes no widths"),
        ({"max_loss": "1%"}, "a frontier has many amounts, and takes no max_loss"),
        ({"quantize": "int8"}, "a frontier takes no --quantize"),
        ({"points": 0}, "points must be at least 1"),
        ({"points": 2.5}, "points is 2.5, expected a whole number"),
        ({"most_loss": 1}, "most_loss must be above 0 and below 1"),
        ({"pick": 11}, "there is no point 11"),
        ({"pick": "much"}, "pick is 'much'"),
        ({"pick": "nan%"}, "pick is 'nan%'"),
        ({"output": "o.onnx"}, "an output needs --pick"),
        ({"nonsense": 1}, "there is no option 'nonsense'"),
    ],
)
def test_wrong_choices_are_usage_errors(model: Path, tmp_path: Path, choices: dict[str, Any], text: str) -> None:
    given = {**CHOICES, **choices}
    output = given.pop("output", None)
    with pytest.raises(UsageError, match=re.escape(text)):
        onnxgrail.frontier(model, output, save_recipes=tmp_path / "r", **given)
    assert list(tmp_path.iterdir()) == []


def test_existing_files_stay(model: Path, tmp_path: Path) -> None:
    (tmp_path / "point2.yaml").write_text("mine")
    with pytest.raises(OutputError, match=r"point2.yaml' exists"):
        onnxgrail.frontier(model, save_recipes=tmp_path, **CHOICES)
    with pytest.raises(OutputError, match="is the input"):
        onnxgrail.frontier(model, report=model.with_suffix(".json"), pick=1, output=model, force=True, **CHOICES)


def test_data_that_can_be_read_once_are_enough(model: Path, tmp_path: Path) -> None:
    choices = {**CHOICES, "data": ({"x": row[None]} for row in DATA["x"]), "points": 2}
    found = onnxgrail.frontier(model, **choices)
    assert found.calibration["samples"] == 64
    report = found.pick(2).report.data
    assert report["calibration"]["samples"] + report["verification"]["held_out"]["samples"] == 64


def test_a_point_is_written_from_what_was_measured(model: Path, tmp_path: Path) -> None:
    source, data = tmp_path / "m.onnx", tmp_path / "d.npz"
    source.write_bytes(model.read_bytes())
    np.savez(data, **DATA)
    found = onnxgrail.frontier(source, **CHOICES | {"data": data, "points": 2})
    assert found.pick(1, tmp_path / "o.onnx").output == tmp_path / "o.onnx"
    np.savez(data, x=DATA["x"] + 1)
    with pytest.raises(UsageError, match=r"d.npz' has changed since the frontier was measured. Measure it again"):
        found.pick(2, tmp_path / "two.onnx")
    np.savez(data, **DATA)
    source.write_bytes(model.read_bytes() + b" ")
    with pytest.raises(UsageError, match=r"m\.onnx' has changed"):
        found.pick(2, tmp_path / "two.onnx")


def test_measures_that_differ_are_named_and_a_loss_without_one_has_no_column(
    model: Path, found: onnxgrail.Frontier, tmp_path: Path
) -> None:
    assert [named({"measure": "NMSE about zero", "counted": c}, "agreement") for c in (False, True)] == ["NMSE ", ""]
    assert named({"measure": "cosine", "counted": False}, "cosine") == ""
    np.savez(tmp_path / "d.npz", **DATA)
    (tmp_path / "own.py").write_text("def loss(a, b, labels):\n    return abs(a['y'] - b['y']).mean(axis=1)\n")
    words = ["frontier", model, "--data", tmp_path / "d.npz", "--minimize", "params", "--points", "2"]
    page = tmp_path / "page.html"
    own = run(*words, "--metric", f"{tmp_path / 'own.py'}:loss", "--report", page)
    (head,) = (line for line in own.stdout.splitlines() if "at most" in line and "params" in line)
    assert head.split() == ["point", "loss", "at", "most", "params", "MACs", "size", "latency"]
    assert "<th></th>" not in page.read_text()


def test_nothing_to_narrow_is_exit_4(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingToCompressError, match="none of the 2 blocks is of the kinds and names asked for"):
        onnxgrail.frontier(model, blocks=("conv",), **CHOICES)


def test_a_killed_run_goes_on_to_the_same_points(
    model: Path, found: onnxgrail.Frontier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed(monkeypatch, 12):
        onnxgrail.frontier(model, resume=tmp_path / "folder", **CHOICES)
    done = recorded(monkeypatch)
    again = onnxgrail.frontier(model, resume=tmp_path / "folder", **CHOICES)
    one, two = ([(p["widths"], p["loss"]) for p in f.to_data()["points"]] for f in (again, found))
    assert one == two
    assert 1 not in done  # no block is tried again


def test_a_trained_model_loses_little_at_first() -> None:
    digits = models.load("digits_resnet")
    found = onnxgrail.frontier(
        digits.model, data=digits.calibration, samples=64, points=3, most_loss="20%", compensate="none"
    )
    assert len(found.points) == 3
    assert found.points[0].loss.mean < found.points[-1].loss.mean
    assert found.points[-1].costs.latency_ms is None or found.before.latency_ms
