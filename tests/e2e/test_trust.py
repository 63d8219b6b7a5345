"""The promises of SECURITY.md on everything that is given to the program: a test for each line of its table."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

import onnxgrail
from onnxgrail.errors import DataError, OutputError, UsageError
from onnxgrail.recipe import storage, trust
from tests.command import run

from . import nets
from .conftest import EVIL
from .test_plugins import install

ROOT = Path(__file__).resolve().parents[2]
COVERED: dict[str, str] = {}


def line(start: str) -> Callable[[Any], Any]:
    """The test stands for the line of the table that begins so."""

    def noted(test: Any) -> Any:
        COVERED[start] = test.__name__
        return test

    return noted


def ran(folder: Path) -> bool:
    return (folder / "RAN").exists()


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def refused(*words: object) -> str:
    """The one line that a command ends with."""
    told = run(*words)
    assert (told.exit_code, told.stderr.count("\n")) == (2, 1), told.output
    return told.stderr


# ------------------------------------------------------------------------------------------------- what the user names


@line("options, and the outputs")
def test_outputs_are_where_options_say(trap: Path) -> None:
    before = listing(trap)
    assert run("compress", "m.onnx", "o.onnx", "--unit-ratio=0.3", "--data", "d.npz").exit_code == 0
    assert listing(trap) - before == {"o.onnx"}
    again = run("compress", "m.onnx", "o.onnx", "--unit-ratio=0.3", "--data", "d.npz")
    assert "--force" in again.stderr


@line("`--data file.py:function`")
def test_code_runs_where_the_command_names_it(trap: Path) -> None:
    assert run("compress", "m.onnx", "--unit-ratio=0.3", "--data", "evil.py:f", "--dry-run").exit_code == 0
    assert ran(trap)
    (trap / "RAN").rmdir()
    onnxgrail.apply({"ratio": 0.5}, "m.onnx", data="d.npz", held_out="evil.py:f", dry_run=True)
    assert ran(trap)


@line("`export file.py:function`")
def test_export_runs_what_it_names(trap: Path) -> None:
    run("export", "evil.py:f", "o.onnx")  # without torch it ends before
    if ran(trap):
        (trap / "RAN").rmdir()
    (trap / "torchvision:evil.py").write_text(EVIL)
    assert run("export", "torchvision:evil.py:f", "o.onnx").exit_code != 0
    assert not ran(trap)


@line("plug-ins that")
def test_a_plugin_is_imported_where_the_command_names_it(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(trap, "stranger", {"onnxgrail.selectors": {"evil": "evil:f"}, "onnxgrail.compensators": {"bad": "evil:f"}})
    monkeypatch.syspath_prepend(trap)
    assert run("compress", "m.onnx", "--unit-ratio=0.3", "--dry-run").exit_code == 0
    for text, option in (("selector: evil", "--selector evil"), ("compensate: bad", "--compensate bad")):
        (trap / "r.yaml").write_text(text)
        assert f"of another package, and no recipe loads plug-ins. If you trust it, give {option}" in refused(
            "apply", "r.yaml", "m.onnx", "--dry-run"
        )
        with pytest.raises(UsageError, match="no recipe loads plug-ins"):
            onnxgrail.apply(yaml.safe_load(text), "m.onnx", dry_run=True)
        assert not ran(trap)
        assert "evil" not in sys.modules
    told = refused("apply", "r.yaml", "m.onnx", "--dry-run", "--selector", "evil", "--compensate", "none")
    assert "is not a plug-in" in told
    assert ran(trap)
    sys.modules.pop("evil")


@line("op rules of installed packages")
def test_rules_are_imported_for_the_ops_of_a_model(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(trap, "stranger", {"onnxgrail.ops": {"com.example.Twice": "evil", "com.example.Lost": "nowhere"}})
    monkeypatch.syspath_prepend(trap)
    assert run("compress", "m.onnx", "--unit-ratio=0.3", "--dry-run").exit_code == 0
    model = onnx.load("m.onnx")
    model.metadata_props.add(key="onnxgrail.ops", value="evil")
    onnx.save(model, "named.onnx")
    assert run("inspect", "named.onnx").exit_code == 0
    assert "evil" not in sys.modules
    assert not ran(trap)


@line("libraries that")
def test_a_library_is_loaded_where_the_command_names_it(trap: Path) -> None:
    (trap / "evil.so").write_bytes(b"not loaded")
    (trap / "r.yaml").write_text("custom_ops: evil.so")
    assert "custom_ops" in refused("apply", "r.yaml", "m.onnx", "--dry-run")
    with pytest.raises(UsageError, match="custom_ops"):
        onnxgrail.apply({"custom_ops": "evil.so"}, "m.onnx", dry_run=True)
    (trap / "r.yaml").write_text("ratio: 0.3")
    assert "evil.so cannot be loaded" in refused("apply", "r.yaml", "m.onnx", "--dry-run", "--custom-ops", "evil.so")


@line("`--metric file.py:function`")
def test_a_metric_is_run_where_the_command_names_it(trap: Path) -> None:
    (trap / "r.yaml").write_text("metric: evil.py:f")
    assert "metric is never taken from a file" in refused("apply", "r.yaml", "m.onnx", "--dry-run")
    assert not ran(trap)
    given = ("--metric", "evil.py:f", "--data", "d.npz", "--max-loss", "0.5")
    assert run("compress", "m.onnx", "--dry-run", *given).exit_code == 1
    assert ran(trap)


@line("packages that `export` names")
def test_checkpoints_are_held_to_numbers() -> None:
    told = (ROOT / "tests" / "export" / "test_hubs.py").read_text()  # which needs torch
    assert "def test_code_of_a_checkpoint_is_not_run" in told
    assert "def test_pickles_of_a_checkpoint_are_not_run" in told


@line("other processes")
def test_one_process_listens_to_nobody(trap: Path) -> None:
    code = "import sys; sys.addaudithook(lambda e, a: e.startswith('socket.') and print(e, a)); "
    code += "from onnxgrail.cli import main; main(['compress', 'm.onnx', '--unit-ratio=0.3', '--dry-run', '-q'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# ---------------------------------------------------------------------------------------------------- files that travel


@line("recipes")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: evil.py:f", "no recipe runs code. Give --data DATA to use it"),
        ("held_out: evil.py:f", "no recipe runs code. Give --held-out DATA to use it"),
        ("tokenizer: evil.py:f", "no recipe runs code. Give --tokenizer FILE to use it"),
        ("keep_tokens: evil.py:f", "no recipe runs code. Give --keep-tokens FILE to use it"),
        ("include: evil.py:f", "no recipe runs code"),
        ("providers: [OpenVINOExecutionProvider]", "Give --device or --providers in the command"),
        ("custom_ops: evil.so", "custom_ops is never taken from a file"),
        ("data: ../d.npz", "outside of the recipe's folder. Give --data DATA to use it"),
        ("data: /etc/passwd", "outside of the recipe's folder"),
        ("data: out.npz", "outside of the recipe's folder"),
        ("data: linked", "outside of the recipe's folder"),
        ("data: full", "outside of the recipe's folder"),
        ("data: absent.npz", "its folder has no such file. Give --data DATA"),
        ("output: o.onnx", "recipes do not say where files are written. Give OUT"),
    ],
)
def test_a_recipe_names_nothing_but_data_beside_it(text: str, words: str, trap: Path) -> None:
    place = trap / "recipe"
    place.mkdir()
    for name in ("evil.py", "onnxgrail_trust_feeds.py"):
        (place / name).write_text((trap / name).read_text())
    (place / "out.npz").symlink_to(trap / "d.npz")
    (place / "linked").symlink_to(trap)
    (place / "full").mkdir()
    (place / "full" / "d.npz").symlink_to(trap / "d.npz")
    (place / "r.yaml").write_text(text)
    before = listing(trap)
    more = ("--dry-run",) if "output" not in text else ()
    assert words in refused("apply", place / "r.yaml", "m.onnx", *more)
    assert listing(trap) == before


@line("reports, and the recipe")
def test_reports_and_models_name_no_files(trap: Path) -> None:
    models = {}
    for key in (*trust.PLACES, "output"):
        model = nets.mlp()
        note = [{"command": "compress", "recipe": {"unit_ratio": 0.3, key: "evil.py:f"}}]
        model.metadata_props.add(key=storage.KEY, value=json.dumps(note))
        models[key] = trap / f"{key}.onnx"
        onnx.save(model, models[key])
    for name, part in (
        ("source", {"calibration": {"synthetic": False, "source": "evil.py:f"}}),
        ("asked", {"verification": {"held_out": {"asked": "evil.py:f"}}}),
        ("plain", {"calibration": {"synthetic": False, "source": "d.npz"}}),
    ):
        (trap / f"{name}.json").write_text(json.dumps({"schema": 1, "recipe": {"ratio": 0.5}, **part}))
    before = listing(trap)
    for file in (*models.values(), "source.json", "asked.json", "plain.json"):
        told = refused("apply", file, "m.onnx")
        assert "only a recipe file may name what is read" in told or "recipes do not say where" in told
    assert listing(trap) == before
    words = ("--data", "d.npz", "--held-out", 4, "--dry-run")
    for file in (*models.values(), "source.json", "asked.json"):
        more = next(((f"--{name.replace('_', '-')}", "t.json") for name in trust.FILES if file == models[name]), ())
        told = run("apply", file, "m.onnx", *words, *more)
        useless = "does nothing" in told.stderr or "is not a file" in told.stderr
        assert (told.exit_code, useless) in ((0, False), (2, True)), told.output
    assert listing(trap) == before


@line("models (")
def test_a_model_reads_nothing_outside_of_its_folder(trap: Path) -> None:
    place = trap / "model"
    place.mkdir()
    for name in ("../m.data", "/etc/passwd", "link.data"):
        (trap / "m.data").unlink(missing_ok=True)
        onnx.save(nets.mlp(), trap / "e.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
        model = onnx.load(trap / "e.onnx", load_external_data=False)
        (place / "link.data").unlink(missing_ok=True)
        (place / "link.data").symlink_to(trap / "m.data")
        for tensor in model.graph.initializer:
            next(entry for entry in tensor.external_data if entry.key == "location").value = name
        (place / "m.onnx").write_bytes(model.SerializeToString())
        told = run("compress", place / "m.onnx", place / "o.onnx", "--unit-ratio=0.3")
        assert (told.exit_code, told.stderr.count("\n")) == (1, 1), told.output
        assert not (place / "o.onnx").exists()


class Bomb:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("RAN",)


@line("`--stats` files")
def test_statistics_are_no_pickles(trap: Path) -> None:
    assert (
        run("compress", "m.onnx", "--unit-ratio=0.3", "--save-stats", "s.npz", "--data", "d.npz", "--dry-run").exit_code
        == 0
    )
    with np.load("s.npz") as file:
        arrays = dict(file)
    name = next(iter(arrays))
    np.savez("s.npz", **{**arrays, name: np.array([Bomb()], dtype=object)}, allow_pickle=True)
    assert (
        run("compress", "m.onnx", "--unit-ratio=0.3", "--stats", "s.npz", "--data", "d.npz", "--dry-run").exit_code == 1
    )
    assert not ran(trap)


@line("all other data")
@pytest.mark.parametrize("name", ["d.npz", "d.npy", "x.npy"])
def test_data_are_no_pickles(name: str, trap: Path) -> None:
    bombs = np.array([Bomb()] * 4, dtype=object)
    if name == "d.npz":
        np.savez(name, x=bombs)
    else:
        np.save(name, bombs, allow_pickle=True)
    with pytest.raises(DataError):
        onnxgrail.compress("m.onnx", data=name, dry_run=True, unit_ratio=0.3)
    assert not ran(trap)


@line("tokenizers")
def test_a_tokenizer_is_no_code(trap: Path) -> None:
    pytest.importorskip("tokenizers")
    onnx.save(nets.transformer(), "t.onnx")
    (trap / "t.txt").write_text("some text\n" * 9)
    for name, text in (("evil.py:f", EVIL), ("evil.py", EVIL), ("t.json", "{}")):
        (trap / name).write_text(text)
        told = run("compress", "t.onnx", "--unit-ratio=0.3", "--data", "t.txt", "--tokenizer", name, "--dry-run")
        assert (told.exit_code, told.stderr.count("\n")) == (1, 1), told.output
    assert not ran(trap)


@line("`--resume` folders")
def test_a_resume_folder_is_this_runs_own(trap: Path) -> None:
    words = ("compress", "m.onnx", "o.onnx", "--unit-ratio=0.3", "--data", "d.npz", "--resume", "kept")
    assert run(*words).exit_code == 0
    assert run(*words).exit_code == 0  # its own output
    other = run(*words, "--unit-ratio", 0.5)
    assert "belongs to another run" in other.stderr
    step = next((trap / "kept" / "steps").iterdir())
    np.savez(step, head=np.array([Bomb()], dtype=object))
    assert run(*words).exit_code == 0  # a step that cannot be read is done again
    assert not ran(trap)
    for name in ("steps", "lock", "scratch", "manifest.json"):
        away = trap / "kept" / name
        away.rename(trap / "away")
        away.symlink_to(trap / "away")
        with pytest.raises(OutputError, match="is a link"):
            onnxgrail.compress("m.onnx", "o.onnx", data="d.npz", resume="kept", unit_ratio=0.3)
        away.unlink()
        (trap / "away").rename(away)


@line("files in the cache folder")
def test_kept_times_are_numbers(trap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXGRAIL_CACHE", str(trap / "cache"))
    words = ("compress", "m.onnx", "--max-loss=50%", "--data", "d.npz", "--dry-run")
    assert run(*words).exit_code in (0, 4)  # 4: times of so small a model may say that nothing can be saved
    kept = list((trap / "cache").iterdir())
    assert kept
    for bad in (b"", b"{}", pickle.dumps(Bomb()), EVIL.encode()):
        for path in kept:
            path.write_bytes(bad)
        assert run(*words).exit_code in (0, 4)
        assert all(json.loads(path.read_text())["notes"] for path in kept)
    assert not ran(trap)


def test_each_line_has_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text[text.index("## What is trusted") : text.index("## Guarantees")]
    rows = [row for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) if row != "given"]
    for row in rows:
        assert [start for start in COVERED if row.startswith(start)], f"no test for {row!r}"
    for start in COVERED:
        assert [row for row in rows if row.startswith(start)], f"no line {start!r}"
