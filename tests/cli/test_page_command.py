"""The command on the page, read by the command line itself, asks for what the report's recipe says."""

from __future__ import annotations

import dataclasses
import json
import shlex

import pytest

from onnxgrail.core import Recipe
from onnxgrail.recipe.check import recipe_of
from onnxgrail.report.page.command import command_of
from tests.cli.standin import recorded
from tests.command import run
from tests.page_data import encoder
from tests.verdicts import judged

RECIPES = {
    "defaults": {},
    "loss": {"max_loss": 0.025, "minimize": "params"},
    "ratio": {"ratio": 0.55},
    "target": {"target_macs": "60%"},
    "switches": {"closed_loop": False, "kv_io": True, "check": False},
    "lists": {"blocks": ("conv", "mlp"), "fit": (), "refine": ("laco",), "providers": ("A", "B")},
    "fit": {"fit": ("prior", "downstream"), "norms": "repair"},
    "words": {"include": "a b|c$", "exclude": "'", "selector": "obs", "reducer": "fold", "compensate": "none"},
    "numbers": {"samples": 7, "batch_size": 3, "seed": 5, "round_to": 1, "min_cosine": 0.95, "budget_seconds": 12.5},
    "methods": {"method": ("grail", "grasp"), "grasp_layers": "2", "grasp_whiten": True},
    "images": {"image_mean": (0.5, 0.25, 0.125), "image_std": (0.5,), "image_form": ("bgr", "pad")},
    "shapes": {"input_shapes": {"x:0": (1, 3, 8), "y": (2,)}, "cache_budget": "2G", "ratio": 0.3, "allocate": "global"},
    "contents": {"contents": {"y=0": "classes", "hidden": "nothing"}},
}


@pytest.mark.parametrize("changes", RECIPES.values(), ids=RECIPES)
def test_it_asks_for_the_same_recipe(changes, monkeypatch):
    calls = recorded(monkeypatch)
    wanted = recipe_of(changes)
    data = encoder(recipe=json.loads(json.dumps(dataclasses.asdict(wanted))))
    words = shlex.split(command_of(data).replace("\\\n", " "))
    assert words[0] == "onnxgrail"
    result = run(*words[1:])
    assert calls, result.output
    call = calls[0]
    names = {f.name for f in dataclasses.fields(Recipe)}
    assert recipe_of({name: value for name, value in call.items() if name in names}) == wanted
    assert (str(call["model"]), str(call["output"]), call["data"]) == ("minilm.onnx", "small.onnx", "calib.npz")


def test_a_dry_run_and_drawn_data_stay_what_they_were(monkeypatch):
    calls = recorded(monkeypatch)
    data = encoder(calibration={"source": "synthetic", "samples": 64, "synthetic": True, "notes": []})
    data["model"]["output"] = None
    run(*shlex.split(command_of(data).replace("\\\n", " "))[1:])
    assert calls[0]["dry_run"] is True
    assert calls[0]["data"] is None


@pytest.mark.parametrize(
    ("source", "word"),
    [("arrays", "DATA"), ("feeds[3]", "DATA"), ("arrays.npz", "arrays.npz"), ("feeds.py:f", "feeds.py:f")],
)
def test_data_without_a_file_are_not_taken_for_one(source, word):
    data = encoder(calibration={"source": source, "samples": 4, "synthetic": False, "notes": []})
    words = shlex.split(command_of(data).replace("\\\n", " "))
    assert words[words.index("--data") + 1] == word


def test_curves_are_asked_for_again():
    for curves in (True, False):
        assert ("--curves" in command_of(encoder(curves=curves))) == curves


def held_out(asked):
    """Samples that nothing was fitted to."""
    return {"asked": asked, "source": "s", "samples": 64, "outputs": []}


def test_what_nobody_asked_for_is_not_asked_for_again():
    assert "--held-out" not in command_of(encoder())


def test_reports_of_before_named_held_out_samples_only():
    data = encoder()
    data["verification"] = {"held_out": held_out("64")}
    assert "--held-out 64" in command_of(data)


@pytest.mark.parametrize(
    ("asked", "word"), [("64", "64"), ("other.npz", "other.npz"), ("arrays", "OTHER_DATA"), ("0", "0")]
)
def test_held_out_samples_are_asked_for_again(asked, word):
    data = encoder()
    data["verification"] |= {"judged": judged(asked=asked), "held_out": held_out(asked)}
    words = shlex.split(command_of(data).replace("\\\n", " "))
    assert words[words.index("--held-out") + 1] == word
