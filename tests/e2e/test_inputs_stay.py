"""Nothing that a command reads is ever written over: with `--force`, under any option, through links."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.errors import OutputError, UsageError
from onnxgrail.machine.files.paths import Read, check_targets
from tests.command import run

from . import nets

READ = ("m.onnx", "w.bin", "d.npz", "folder/a.npz", "h.npz", "s.npz", "t.json", "sizes.png")
WORDS = ("--data", "d.npz", "--held-out", "h.npz", "--stats", "s.npz", "--tokenizer", "t.json")
OPTIONS = ("--output", "--save-recipe", "--report")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its weights in `w.bin`, and a file of every other kind that `compress` reads."""
    monkeypatch.chdir(tmp_path)
    onnx.save(nets.mlp(), "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "folder").mkdir()
    for name in ("d.npz", "h.npz", "s.npz", "folder/a.npz"):
        np.savez(name, **nets.vectors())
    Path("t.json").write_text("{}")
    Path("sizes.png").write_bytes(b"an image")
    return tmp_path


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(place: Path, *words: object) -> str:
    """Return the message of a command that must not write anything."""
    before = bytes_of(place)
    done = run(*words)
    assert done.exit_code in (1, 2), done.output
    assert done.stderr.count("\n") == 1
    assert "internal error" not in done.stderr
    assert bytes_of(place) == before
    return done.stderr


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["m.onnx", "w.bin", "d.npz", "h.npz", "s.npz", "t.json"])
def test_no_option_takes_what_is_read(name: str, option: str, place: Path) -> None:
    suffix = {"--output": ".onnx", "--save-recipe": ".yaml", "--report": ".json"}[option]
    for link in (os.symlink, os.link):
        target = place / f"{link.__name__}{suffix}"
        link(place / name, target)
        said = refused(place, "compress", "m.onnx", "--unit-ratio=0.3", *WORDS, "--force", option, target.name)
        assert f"{option} {target.name!r} is " in said
        assert "never replaced" in said
    if option == "--output":
        assert " is " in refused(place, "compress", "m.onnx", "--unit-ratio=0.3", *WORDS, "--force", option, name)


def test_statistics_do_not_go_over_what_is_read(place: Path) -> None:
    for name in ("m.onnx", "w.bin", "d.npz"):
        assert " is " in refused(
            place, "compress", "m.onnx", "--unit-ratio=0.3", "--data", "d.npz", "--force", "--save-stats", name
        )


def test_weights_of_a_model_that_is_an_object(place: Path) -> None:
    before = bytes_of(place)
    for target in ("w.bin", "m.onnx"):
        model = ir.load("m.onnx") if target == "w.bin" else "m.onnx"
        with pytest.raises(OutputError, match=r"is (a weights file of )?the input"):
            onnxgrail.compress(model, target, data=nets.vectors(), force=True, unit_ratio=0.3)
    assert bytes_of(place) == before


def test_a_library_of_operators_stays(place: Path) -> None:
    Path("ops.so").write_bytes(b"not one")
    words = ("compress", "m.onnx", "--unit-ratio=0.3", "--custom-ops", "ops.so", "--force", "-o", "ops.so")
    assert "is an operator library" in refused(place, *words)


def test_files_in_a_folder_of_data_stay(place: Path) -> None:
    words = ("compress", "m.onnx", "--unit-ratio=0.3", "--data", "folder", "--force", "--save-stats")
    for name in ("folder/a.npz", "folder/new.npz"):  # which the next run would take for samples
        assert "belongs to the calibration data" in refused(place, *words, name)
    os.link("folder/a.npz", "twin.npz")
    assert "belongs to the calibration data" in refused(place, *words, "twin.npz")
    done = run(
        "compress",
        "m.onnx",
        "--unit-ratio=0.3",
        "--data",
        "folder",
        "--output",
        "folder/o.onnx",
        "--report",
        "folder/r.json",
        "-q",
    )
    assert done.exit_code == 0, done.stderr
    again = run(
        "compress", "m.onnx", "--unit-ratio=0.3", "--data", "folder", "--output", "folder/o.onnx", "--force", "-q"
    )
    assert again.exit_code == 0, again.stderr


def test_what_a_run_keeps_goes_nowhere_over_data(place: Path) -> None:
    (place / "kept").mkdir()
    Path("m.onnx").rename("kept/m.onnx")
    Path("w.bin").rename("kept/w.bin")
    assert "--resume 'kept' holds the input" in refused(
        place, "compress", "kept/m.onnx", "--unit-ratio=0.3", "--resume", "kept"
    )


def test_weights_below_the_folder_of_a_run_stay(place: Path) -> None:
    # A run that goes on empties its scratch folder.
    done = run("compress", "m.onnx", "--unit-ratio=0.3", "-q", "--resume", "kept", "--data", "d.npz")
    assert done.exit_code == 0, done.stderr
    onnx.save(nets.mlp(), "n.onnx", save_as_external_data=True, location="kept/scratch/w.bin", size_threshold=0)
    assert "holds a weights file" in refused(
        place, "compress", "n.onnx", "--unit-ratio=0.3", "--resume", "kept", "--data", "d.npz"
    )


def test_the_page_of_inspect_and_the_output_of_apply(place: Path) -> None:
    Path("w.bin").rename("w.html")
    model = onnx.load("m.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "w.html"
    onnx.save(model, "m.onnx")
    assert "is a weights file of the input" in refused(place, "inspect", "m.onnx", "--html", "w.html")
    Path("r.json").write_text(json.dumps({"ratio": 0.5}))
    for words in (("-o", "r.json"), ("--report", "r.json")):
        assert "is the recipe" in refused(place, "apply", "r.json", "m.onnx", "--force", *words)


def test_two_results_do_not_go_into_one_file(place: Path) -> None:
    said = refused(place, "compress", "m.onnx", "--unit-ratio=0.3", "-o", "r.json", "--report", "./r.json")
    assert "--report 'r.json' is the file of --output" in said
    said = refused(place, "compress", "m.onnx", "--unit-ratio=0.3", "--report", "r.json", "--report", "r.json")
    assert "is the file of --report" in said


def test_a_new_folder_is_made_when_there_is_something_to_write(place: Path) -> None:
    target = place / "new" / "folder" / "o.onnx"
    reports = (place / "reports" / "r.json", place / "pages" / "r.html")
    with pytest.raises(onnxgrail.DataError):
        onnxgrail.compress("m.onnx", target, data="absent.npz", report=reports, unit_ratio=0.3)
    assert not (place / "new").exists()
    onnxgrail.compress(
        "m.onnx",
        target,
        data="d.npz",
        report=reports,
        save_recipe=place / "a/b/r.yaml",
        save_stats=place / "c/s.npz",
        unit_ratio=0.3,
    )
    assert all(path.exists() for path in (target, *reports, place / "a/b/r.yaml", place / "c/s.npz"))


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    check_targets([("--report", loop)], [Read(path=tmp_path / "m.onnx", what="the input")])
    with pytest.raises(OutputError, match="is the input"):
        check_targets([("--report", loop)], [Read(path=loop, what="the input")])
    with pytest.raises(UsageError, match="is the file of --a"):
        check_targets([("--a", tmp_path / "x"), ("--b", tmp_path / "y" / ".." / "x")], [])
