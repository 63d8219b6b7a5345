"""The choices that `--effort` fills in, and the selector that `auto` takes for a block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.algebra.select.selectors import SELECTORS, needs_gram_of, taken
from onnxgrail.algebra.select.selectors.auto import Auto
from onnxgrail.commands import frontier
from onnxgrail.core import View
from onnxgrail.errors import UsageError
from onnxgrail.fidelity.words import _ways
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.table import FIELDS
from onnxgrail.search import within
from tests.command import run
from tests.e2e import nets
from tests.unit.algebra_builders import mlp


@pytest.mark.parametrize(
    ("choices", "wanted"),
    [
        ({}, ("auto", "best", "auto")),
        ({"effort": "normal"}, ("auto", "best", "auto")),
        ({"effort": "fast"}, ("auto", "grail", "auto")),
        ({"effort": "max"}, ("obs", "best", "auto")),
        ({"effort": "max", "ratio": 0.3}, ("obs", "best", "global")),
        ({"effort": "max", "max_loss": "1%"}, ("obs", "best", "auto")),
        ({"effort": "fast", "compensate": "best"}, ("auto", "best", "auto")),
        ({"effort": "max", "selector": "l2", "allocate": "depth", "ratio": 0.3}, ("l2", "best", "depth")),
        ({"effort": "max", "selector": "auto", "target_params": "60%"}, ("auto", "best", "global")),
        ({"compensate": "none"}, ("wanda", "none", "auto")),
        ({"compensate": "none", "selector": "auto"}, ("wanda", "none", "auto")),
        ({"compensate": "none", "selector": "obs"}, ("obs", "none", "auto")),
        ({"effort": "max", "compensate": "none", "unit_ratio": 0.3}, ("wanda", "none", "global")),
    ],
)
def test_the_effort_fills_in_what_nobody_chose(choices: dict[str, Any], wanted: tuple[str, str, str]) -> None:
    recipe = recipe_of(choices)
    assert (recipe.selector, recipe.compensate, recipe.allocate) == wanted


@pytest.mark.parametrize("command", ["compress", "frontier"])
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), ("auto", "auto")),
        (("--effort", "max"), ("obs", "auto")),
        (("--effort", "max", "--selector", "auto"), ("auto", "auto")),
        (("--effort", "max", "--selector", "l2", "--compensate", "none"), ("l2", "none")),
    ],
)
def test_the_effort_of_a_command_fills_in_what_nobody_chose(
    command: str, words: tuple[str, ...], wanted: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command gives the library none of the defaults that its help shows."""
    seen: dict[str, Any] = {}

    def call(*_: Any, progress: Any, **choices: Any) -> None:
        seen.update(choices)
        raise UsageError("seen")

    monkeypatch.setattr(onnxgrail, command, call)
    run(command, "m.onnx", *words)
    recipe = recipe_of({name: value for name, value in seen.items() if name in FIELDS})
    assert (recipe.selector, recipe.compensate if "none" in words else "auto") == wanted


def test_fast_on_the_command_line_is_fast(tmp_path: Path) -> None:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    done = run("compress", tmp_path / "m.onnx", "--ratio", 0.3, "--effort", "fast", "--dry-run", "--json")
    assert json.loads(done.stdout)["recipe"]["compensate"] == "grail"


@pytest.mark.parametrize(
    ("choices", "torch", "wanted"),
    [
        ({"effort": "max"}, True, ("laco", "distill")),
        ({"effort": "max"}, False, ()),
        ({"effort": "normal"}, True, ()),
        ({"effort": "max", "refine": "none"}, True, ()),
        ({"effort": "max", "refine": "norms"}, True, ("norms",)),
        ({"effort": "max", "refine": "norms"}, False, ("norms",)),  # the run then says that torch is missing
        ({"effort": "max", "compensate": "none"}, True, ()),
    ],
)
def test_most_effort_refines_where_torch_is_installed(
    choices: dict[str, Any], torch: bool, wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxgrail.recipe.effort.find_spec", lambda name: object() if torch else None)
    assert recipe_of(choices).refine == wanted


def test_points_of_a_frontier_are_not_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgrail.recipe.effort.find_spec", lambda name: object())
    recipe = frontier._recipe_of({"effort": "max"}, "data.npz", 0.1)
    assert (recipe.selector, recipe.refine) == ("obs", ())


def test_an_unknown_effort_is_named() -> None:
    with pytest.raises(UsageError, match=r"effort has no 'huge'") as error:
        recipe_of({"effort": "huge"})
    assert "fast, normal, max" in error.value.hint


def test_a_larger_effort_tries_more_and_ends_closer_to_the_limit() -> None:
    tries, shares = zip(*(within.PATIENCE[name] for name in ("fast", "normal", "max")), strict=True)
    assert list(tries) == sorted(set(tries))
    assert list(shares) == sorted(set(shares))


def scores(name: str, view: View) -> list[float]:
    found: list[float] = SELECTORS[name](view, np.random.default_rng(0)).tolist()
    return found


@pytest.mark.parametrize(
    ("small", "rows", "name"), [(8, 64, "obs"), (8, 63, "wanda"), (8, 3, "wanda"), (9, 63, "obs"), (9, 3, "obs")]
)
def test_auto_eliminates_where_that_is_cheap(small: int, rows: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in small blocks, and beside the sums over many rows."""
    monkeypatch.setitem(SELECTORS, "auto", Auto(small=small))
    view = mlp(np.random.default_rng(1), units=8, rows=rows)
    assert taken("auto", view) == name
    assert scores("auto", view) == scores(name, view)


def test_auto_does_not_eliminate_in_wide_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of their channels are then not measured."""
    view = mlp(np.random.default_rng(1), units=4, members=2, rows=64)
    monkeypatch.setitem(SELECTORS, "auto", Auto(widest=7))
    assert not needs_gram_of("auto", view.block)
    alone = replace(view, stats=tuple(replace(s, gram=np.array(s.squares)) for s in view.stats))
    assert [taken("auto", v) for v in (view, alone)] == ["wanda", "wanda"]
    assert scores("auto", alone) == scores("wanda", view)
    monkeypatch.setitem(SELECTORS, "auto", Auto(widest=8))
    assert needs_gram_of("auto", view.block)
    assert taken("auto", view) == "obs"


def test_other_selectors_are_taken_for_every_block() -> None:
    view = mlp(np.random.default_rng(1))
    assert [taken(name, view) for name in ("l2", "wanda", "obs")] == ["l2", "wanda", "obs"]
    assert [needs_gram_of(name, view.block) for name in ("l2", "wanda", "obs")] == [False, False, True]


def test_what_brings_a_result_closer_is_an_option_of_the_method() -> None:
    assert _ways({"ratio": 0.3, "method": ["grail"], "selector": "auto"}) == ["a smaller --ratio", "--selector obs"]
    assert _ways({"ratio": None, "method": ["grasp"]}) == ["fewer --grasp-layers", "a larger --grasp-retain"]
