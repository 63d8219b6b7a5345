"""The table of options agrees with the recipe, the typed keywords and the plug-in tables."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

import onnxgrail
from onnxgrail.errors import UsageError
from onnxgrail.machine.amounts import METRICS
from onnxgrail.methods import METHODS
from onnxgrail.options import Recipe
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.choices import Choices, Options, RefineChoices
from onnxgrail.recipe.keywords import READERS
from onnxgrail.recipe.table import AMOUNTS, FIELDS, GROUPS, OPTIONS
from onnxgrail.recipe.table.option import Value

TYPES = {
    "bool": {"flag"},
    "Metric": {"word"},
    "float": {"number", "portion", "share"},
    "int": {"whole"},
    "str": {"amount", "file", "layers", "pattern", "text", "word"},
    "tuple[Kind, ...]": {"words"},
    "tuple[float, ...]": {"numbers"},
    "tuple[str, ...]": {"names", "words"},
    "Mapping[str, tuple[int, ...]]": {"shapes"},
    "Mapping[str, int]": {"widths"},
    "Mapping[str, str]": {"contents"},
}
TERMINAL = {"as_json", "device", "no_progress", "quiet", "verbose"}  # options that only the command line has
ARGUMENTS = {"data", "held_out", "output"}  # arguments with a name of their own in every signature


def test_every_row_has_a_name_of_its_own():
    assert sum(map(len, GROUPS.values())) == len(OPTIONS)
    spellings = [word for row in OPTIONS.values() for word in (row.spelled, *row.also, row.off) if word]
    assert len(spellings) == len(set(spellings))


def test_types_are_those_of_the_recipe():
    for field in dataclasses.fields(Recipe):
        assert FIELDS[field.name].value.kind in TYPES[str(field.type).removesuffix(" | None")], field.name


def test_typed_keywords_are_the_rows():
    compress = {name for name, row in OPTIONS.items() if not {"compress"}.isdisjoint(row.commands)}
    assert set(Choices.__annotations__) == set(FIELDS)
    assert set(Options.__annotations__) - {"group", "progress"} == (compress | set(FIELDS)) - TERMINAL - ARGUMENTS
    refine = {name for name, row in FIELDS.items() if "refine" in row.commands}
    assert set(RefineChoices.__annotations__) == refine
    assert set(OPTIONS) - TERMINAL - {"data", "held_out", "metric", "reference"} <= set(READERS)


def test_words_are_those_of_the_library():
    assert {"grail", *METHODS} <= set(FIELDS["method"].value.words)
    assert [name for name in AMOUNTS if name.startswith("target_")] == [f"target_{metric}" for metric in METRICS]


def test_defaults_are_allowed():
    for name, row in FIELDS.items():
        if row.value.words and row.default is not None:
            words = (row.default,) if isinstance(row.default, str) else row.default
            assert set(words) <= set(row.value.words), name
        elif isinstance(row.default, int | float):
            assert row.value.allows(row.default), name


@pytest.mark.parametrize(
    ("value", "good", "bad", "words"),
    [
        (Value(kind="number", least=0, below=1), (0, 0.5), (-0.1, 1), "at least 0 and below 1"),
        (Value(kind="number", above=0), (0.1, 9), (0, -1), "above 0"),
        (Value(kind="number", least=-1, most=1), (-1, 1), (-1.1, 1.1), "at least -1 and at most 1"),
    ],
)
def test_limits(value, good, bad, words):
    assert value.limits == words
    assert all(map(value.allows, good))
    assert not any(map(value.allows, (*bad, float("nan"))))


def test_words_for_nothing_are_words_of_their_option_alone():
    assert recipe_of({"fit": "plain", "refine": "none"}).fit == ()
    assert recipe_of({"providers": ""}).providers == ("",)
    with pytest.raises(UsageError, match="norms has no 'plain'"):
        recipe_of({"norms": "plain"})


def test_the_table_imports_nothing_heavy():
    code = "import sys, onnxgrail.recipe.table as t; sys.exit(bool({'numpy', 'click', 'onnx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("call", [onnxgrail.compress, onnxgrail.compress_folder])
def test_a_group_comes_from_join(call: Any) -> None:
    with pytest.raises(UsageError, match=r"group is 'x', expected what onnxgrail\.join\(\) gives"):
        call("m", group="x")
