"""Names that a recipe may hold, and those that it may not: places, code, patterns without end."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path

import onnx
import pytest

import onnxgrail
from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.machine.amounts import METRICS
from onnxgrail.recipe import selection, storage, trust
from onnxgrail.recipe.check import recipe_of
from tests.command import run

from . import nets
from .test_trust import refused

NAMES = ("evil.py:f", "./evil.py:f", "evil.py:f/", "x/../evil.py:f", "{}/evil.py:f", "link", "sub", "a\0b", "l" * 5000)

# From Python 3.14 on, a path that cannot be looked up is one that is not there.
REFUSED = r"which is (code|not a path)[^.]*\. Give --data DATA to use it$|has no such file\. Give --data DATA$"


@pytest.mark.parametrize("text", NAMES, ids=range(len(NAMES)))
def test_no_spelling_makes_code_of_data(text: str, trap: Path) -> None:
    (trap / "evil.py:f").write_text("a file of that name")
    (trap / "link").symlink_to(trap / "evil.py:f")
    (trap / "sub").symlink_to(trap / "sub")
    with pytest.raises(UsageError, match=REFUSED):
        trust.place(trust.Origin(label="r.yaml", folder=trap), "data", text.format(trap))


def test_data_beside_a_recipe_is_found_from_elsewhere(folder: Path) -> None:
    recipe = folder / "r.yaml"
    words = ("--data", folder / "d.npz", "--save-recipe", recipe, "--held-out", 4)
    assert run("compress", folder / "m.onnx", folder / "a.onnx", "--unit-ratio=0.3", *words).exit_code == 0
    assert "output" not in recipe.read_text()
    moved = folder / "moved"
    moved.mkdir()
    for name in ("r.yaml", "d.npz"):
        (folder / name).rename(moved / name)
    assert run("apply", moved / "r.yaml", folder / "m.onnx", folder / "b.onnx").exit_code == 0
    assert (folder / "b.onnx").read_bytes() == (folder / "a.onnx").read_bytes()


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_saved_recipe_leaves_out_what_lies_elsewhere(suffix: str, folder: Path) -> None:
    place = folder / "recipes"
    place.mkdir()
    recipe = recipe_of({"tokenizer": str(folder / "t.json")})
    notes = storage.save(place / f"r.{suffix}", recipe, data="evil.py:f", held_out=nets.vectors())
    assert [note.partition(":")[0] for note in notes] == [
        f"r.{suffix} leaves out the data, which is code, and no recipe runs code",
        f"r.{suffix} leaves out the held-out data, which came as arrays of a Python call",
        f"r.{suffix} leaves out the tokenizer, which lies outside of the recipe's folder",
    ]
    text = (place / f"r.{suffix}").read_text()
    assert str(folder) not in text
    assert "evil" not in text
    assert storage.read(place / f"r.{suffix}").named == {}
    told = run(
        "compress", folder / "m.onnx", "--unit-ratio=0.3", "--data", folder / "d.npz", "--save-recipe", place / "s.yaml"
    )
    assert "Note: s.yaml leaves out the data, which lies outside of the recipe's folder" in told.stderr


def test_every_choice_of_a_recipe_is_a_number_or_a_word() -> None:
    """A new option of text must be told from a place or a name of code: see `trust.py`."""
    free = {"include", "exclude", "grasp_layers", "cache_budget", *(f"target_{what}" for what in METRICS)}
    other = {"providers", "input_shapes", "contents", "widths", "bits"}
    for field in fields(Recipe):
        kind = str(field.type)
        if "str" not in kind or field.name in (*free, *trust.PLACES, *trust.COMMAND_ONLY, *other):
            continue
        with pytest.raises(UsageError, match=r"has no .*Choose from"):
            recipe_of({field.name: "no such word"})


def test_a_pattern_of_a_recipe_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SECONDS", 0.2)
    model = nets.mlp()
    model.graph.node[0].name = "a" * 60
    onnx.save(model, folder / "m.onnx")
    for text in ("include: (a+)+$", "exclude: (a|a)*b"):
        (folder / "r.yaml").write_text(text)
        started = time.monotonic()
        told = refused("apply", folder / "r.yaml", folder / "m.onnx", "--data", folder / "d.npz", "--dry-run")
        assert "takes more than 0.2 seconds on the names of this model" in told
        assert time.monotonic() - started < 5
    deep = run("compress", folder / "m.onnx", "--unit-ratio=0.3", "--include", "(" * 5000 + ")" * 5000)
    assert (deep.exit_code, "nested too deeply" in deep.stderr) == (2, True)


def test_models_do_not_say_where_a_tokenizer_lay() -> None:
    model = onnxgrail.compress(nets.mlp(), ratio=0).model
    storage.mark(model, recipe_of({"tokenizer": "/home/me/t.json"}))
    assert "t.json" not in model.metadata_props[storage.KEY]


def test_a_report_of_odd_parts_is_no_recipe(trap: Path) -> None:
    for part in (3, "text", [1], {"held_out": [1], "source": {}}, {"source": ["d.npz"], "synthetic": False}):
        (trap / "r.json").write_text(json.dumps({"schema": 1, "recipe": {}, "calibration": part, "verification": part}))
        told = run("apply", "r.json", "m.onnx", "--dry-run", "-q")
        assert told.exit_code in (0, 2), told.output
        assert "internal" not in told.stderr
