"""A run's choices outlive it: in the report, in the written model, in files; and they give the same bytes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

import onnxgrail
from onnxgrail.recipe import storage
from onnxgrail.recipe.check import recipe_of
from tests.command import in_a_process, run

from . import nets

CHOICES = ("--ratio", "0.5", "--selector", "l2", "--blocks", "mlp,conv", "--round-to", "1", "--compensate", "grail")


def notes(path: Path) -> list[Any]:
    found = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    runs: list[Any] = json.loads(found["onnxgrail.recipe"])
    return runs


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_a_saved_recipe_gives_the_same_bytes(suffix: str, folder: Path) -> None:
    recipe, report = folder / f"r.{suffix}", folder / "r2.json"
    common = ["--data", folder / "d.npz", "--report", report, "--save-recipe", recipe, *CHOICES]
    assert run("compress", folder / "m.onnx", folder / "a.onnx", *common).exit_code == 0
    result = run("apply", recipe, folder / "m.onnx", folder / "b.onnx")
    assert result.exit_code == 0, result.output
    assert "Written:" in result.stdout
    for source in (report, folder / "a.onnx"):  # both hold the recipe, the model without the place of its data
        again = folder / f"{source.suffix[1:]}.onnx"
        assert run("apply", source, folder / "m.onnx", again, "--data", folder / "d.npz").exit_code == 0
        assert again.read_bytes() == (folder / "a.onnx").read_bytes()
    assert (folder / "a.onnx").read_bytes() == (folder / "b.onnx").read_bytes()
    beside = run("apply", recipe, folder / "m.onnx")  # a recipe does not say where to write
    assert (beside.exit_code, (folder / "m.compressed.onnx").exists()) == (0, True), beside.output
    text = recipe.read_text()
    written = json.loads(text) if suffix == "json" else yaml.safe_load(text)
    assert (written["selector"], written["blocks"], written["data"]) == ("l2", ["mlp", "conv"], "d.npz")


def test_a_repeated_run_may_be_killed_too(folder: Path) -> None:
    recipe, kept = folder / "r.yaml", folder / "kept"
    common = ("--data", folder / "d.npz", "--save-recipe", recipe, *CHOICES)
    assert run("compress", folder / "m.onnx", folder / "a.onnx", *common).exit_code == 0
    words = ("apply", recipe, folder / "m.onnx", folder / "b.onnx", "--resume", kept)
    for _ in range(2):  # the second time the output is this run's own
        again = run(*words)
        assert again.exit_code == 0, again.output
        assert (folder / "b.onnx").read_bytes() == (folder / "a.onnx").read_bytes()
    assert any((kept / "steps").iterdir())


def test_the_model_tells_all_runs_and_no_places(folder: Path) -> None:
    assert (
        run("compress", folder / "m.onnx", folder / "a.onnx", "--data", folder / "d.npz", "--ratio=0.3").exit_code == 0
    )
    words = ("--data", folder / "d.npz", "--ratio", "0.2", "--round-to", "1", "--report", folder / "r.json")
    assert run("compress", folder / "a.onnx", folder / "b.onnx", *words).exit_code == 0
    first, second = notes(folder / "b.onnx")
    assert notes(folder / "a.onnx") == [first]
    assert (first["recipe"]["ratio"], second["recipe"]["ratio"]) == (0.3, 0.2)
    assert second["recipe"] == json.loads((folder / "r.json").read_text())["recipe"]
    assert second["version"] == onnxgrail.__version__
    assert str(folder) not in json.dumps([first, second])


def test_data_output_and_choices_of_the_call_go_first(folder: Path) -> None:
    onnxgrail.compress(
        folder / "m.onnx", folder / "a.onnx", data=folder / "d.npz", ratio=0.5, save_recipe=folder / "r.yaml"
    )
    other = onnxgrail.apply(folder / "r.yaml", nets.mlp(), folder / "b.onnx", data=nets.vectors(seed=5), ratio=0.25)
    assert other.output == folder / "b.onnx"
    assert other.report.data["recipe"]["ratio"] == 0.25
    assert other.report.data["calibration"]["source"] != str(folder / "d.npz")
    dry = onnxgrail.apply(folder / "r.yaml", nets.mlp(), dry_run=True)
    assert dry.report.data["calibration"]["source"] == str((folder / "d.npz").resolve())
    from_choices = onnxgrail.apply({"ratio": "50%", "target-params": None}, nets.mlp(), data=nets.vectors())
    assert from_choices.report.data["recipe"] == dry.report.data["recipe"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ratoi: 0.3", "no key 'ratoi'. Did you mean 'ratio'?"),
        ("target_parms: 50%", "Did you mean 'target_params'?"),
        ("zzzz: 1", "Known keys: "),
        ("ratio: much", "ratio is 'much', expected a number"),
        ("ratio: 1.5", "ratio must be at least 0 and below 1"),
        ("ratio: true", "expected a number"),
        ("round_to: 1.5", "round_to is 1.5, expected a whole number"),
        ("closed_loop: 1", "expected true or false"),
        ("blocks: [1]", "expected a list of words"),
        ("selector: 3", "selector is 3, expected text"),
        ("selector: l3", "selector has no 'l3'"),
        ("input_shapes: {x: [a]}", "expected input names with lists of sizes"),
        ("- ratio", "holds a list, expected keys and values"),
        ("", "holds nothing, expected keys and values"),
        ("image_mean: [0.5, a]", "image_mean is [0.5, 'a'], expected a number, or a list of numbers"),
        ("seed: -1", "seed must be at least 0, got -1"),
        ("ridge: .nan", "ridge must be at least 0, got nan"),
        ("sequence_length: 0", "sequence_length must be at least 1, got 0"),
        ("batch_size: 0", "batch_size must be at least 1, got 0"),
        ("budget_seconds: 0", "budget_seconds must be above 0, got 0"),
        ("blocks: []", "blocks is empty. Choose from conv, mlp, heads, qk, vo, stream"),
        ("providers: []", "providers is empty. Leave it out for the default"),
        ("ridge: -0.5", "ridge must be at least 0, got -0.5"),
        ("min_cosine: 5", "min_cosine must be at least -1 and at most 1, got 5"),
        ("min_cosine: .nan", "min_cosine must be at least -1 and at most 1, got nan"),
        ("check: false\nmin_cosine: 0.5", "min_cosine needs the check that check=False (--no-check) turns off"),
        ("providers: Foo", "names the execution provider 'Foo'"),
        ("force: true", "no key 'force'. Known keys: "),
        ("a: [", "cannot be read as a recipe"),
        ("ratio: 0.3\nseed: 1\nratio: 0.9", "the key 'ratio' stands twice"),
        ("contents: {y: [values]}", "expected output names with words"),
        ("contents: {y: numbers}", "contents has no 'numbers'. Choose from classes, scores, values"),
        ("input_shapes: {x: [1], x: [2]}", "the key 'x' stands twice"),
        ("<<: {ratio: 0.9}\nseed: 7", "the key '<<' is not taken"),
        ("data: {a: 1}", "data is {'a': 1}, expected text"),
        ("held_out: [4]", "held_out is [4], expected text"),
        ("output: true", "output is True, expected text"),
        (f"ratio: {'a' * 9999}", "..."),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(text: str, words: str, folder: Path) -> None:
    (folder / "r.yaml").write_text(text)
    result = run("apply", folder / "r.yaml", folder / "m.onnx", "--data", folder / "d.npz")
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "m.compressed.onnx").exists()


def bomb(key: str) -> str:
    """Two hundred letters of YAML that are 10 to the 10 words when written out."""
    levels = [f"&a{n} [{','.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(10)]
    return f"{key}: [{', '.join(levels)}]"


def test_aliases_are_not_written_out(folder: Path) -> None:
    keys = ("ratio", "blocks", "seed", "data", "onnxgrail", "input_shapes", "zzzz", "image_mean")
    for key in keys:
        (folder / f"{key}.yaml").write_text(bomb(key) + ("\nratio: 0.3" if key == "onnxgrail" else ""))
    calls = [(folder, ["apply", f"{key}.yaml", "m.onnx", "--data", "d.npz", "--dry-run"]) for key in keys]
    for key, (code, stderr) in zip(keys, in_a_process(calls), strict=True):
        assert code == (0 if key == "onnxgrail" else 2), stderr[:1000]  # the version is not asked for
        assert key == "onnxgrail" or key in stderr
        assert len(stderr) < 2000


def test_a_key_stands_once_in_json_too(folder: Path) -> None:
    (folder / "r.json").write_text('{"ratio": 0.3, "ratio": 0.4}')
    told = run("apply", folder / "r.json", folder / "m.onnx")
    assert (told.exit_code, "the key 'ratio' stands twice" in told.stderr) == (2, True), told.stderr


def test_files_that_cannot_be_recipes(folder: Path) -> None:
    (folder / "r.txt").write_text("ratio: 0.3")
    assert "no recipe" in run("apply", folder / "m.onnx", folder / "m.onnx").stderr
    assert "unknown suffix" in run("apply", folder / "r.txt", folder / "m.onnx").stderr
    absent = run("apply", folder / "absent.yaml", folder / "m.onnx")
    assert absent.exit_code == 1
    assert "absent.yaml'. Give a file of --save-recipe, a JSON report, or a model that onnxgrail wrote" in absent.stderr
    for name, words in (("r.txt", "unknown suffix"), ("m.compressed.onnx.json", "is the file of --output")):
        output = folder / "m.compressed.onnx.json"
        result = run("compress", folder / "m.onnx", output, "--save-recipe", folder / name)
        assert result.exit_code == 2
        assert words in result.stderr
    assert not (folder / "m.compressed.onnx.json").exists()


STRANGE = ("{}", "[1]", '[{"command": "compress"}]', '[{"command": 1, "recipe": [1]}]', "[" * 10**5)


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_notes_of_others_under_our_name_are_no_recipe(text: str, folder: Path) -> None:
    model = nets.mlp()
    model.metadata_props.add(key=storage.KEY, value=text)
    onnx.save(model, folder / "n.onnx")
    told = run("apply", folder / "n.onnx", folder / "m.onnx", "--data", folder / "d.npz")
    assert (told.exit_code, "holds no recipe" in told.stderr) == (2, True), told.stderr
    assert (
        run("compress", folder / "n.onnx", folder / "o.onnx", "--data", folder / "d.npz", "--ratio=0.3").exit_code == 0
    )
    assert [entry["command"] for entry in notes(folder / "o.onnx")] == ["compress"]


@pytest.mark.parametrize("name", ["r.yaml", "r.json"])
def test_a_recipe_without_bottom_is_refused(name: str, folder: Path) -> None:
    (folder / name).write_text("[" * 10**5)
    told = run("apply", folder / name, folder / "m.onnx")
    assert (told.exit_code, "cannot be read as a recipe" in told.stderr) == (2, True), told.stderr


def test_every_choice_comes_back(tmp_path: Path) -> None:
    chosen = {
        "target_macs": "60%", "blocks": ("mlp",), "include": "a.*", "samples": 7, "fit": (), "ridge": 1e-05,
        "norms": "all", "refine": ("laco", "distill"), "method": ("grail", "grasp"), "grasp_layers": "2",
        "budget_seconds": 3.5, "closed_loop": False, "input_shapes": {"x:0": (1, 3)}, "min_cosine": 0.5,
        "image_mean": (0.5, 1.0, 0.0), "image_std": (0.25,), "image_form": ("pad",), "sequence_length": 9,
        "contents": {"y": "values"},
    }  # fmt: skip
    recipe = recipe_of(chosen)
    for name in ("r.yaml", "r.json"):
        storage.save(tmp_path / name, recipe)
        assert recipe_of(storage.read(tmp_path / name).choices) == recipe
    (tmp_path / "short.yaml").write_text("ridge: 1e-5\nclosed-loop: false")  # YAML takes the number for a word
    assert recipe_of(storage.read(tmp_path / "short.yaml").choices) == recipe_of({"ridge": 1e-5, "closed_loop": False})
    (tmp_path / "other.yaml").write_text("sparsity: 0.4\ncalib: d.npz\nimage-std: 2\nimage-mean: 1e-1")
    other = storage.read(tmp_path / "other.yaml")  # as the command line takes them
    assert other.named["data"] == "d.npz"
    assert recipe_of(other.choices) == recipe_of({"ratio": 0.4, "image_std": 2, "image_mean": 0.1})


def test_a_report_does_not_replace_the_recipe(folder: Path) -> None:
    twice = folder / "r.json"
    done = run("compress", folder / "m.onnx", "--report", twice, "--save-recipe", folder / "." / "r.json")
    assert done.exit_code == 2
    assert "is the file of --save-recipe" in done.stderr
    assert not twice.exists()


def test_a_report_of_a_refinement_is_not_repeated(folder: Path) -> None:
    done = run("compress", folder / "m.onnx", "--ratio=0", "--dry-run", "--report", folder / "r.json")
    assert done.exit_code == 0, done.stderr
    report = json.loads((folder / "r.json").read_text())
    (folder / "f.json").write_text(json.dumps({**report, "reference": {"path": "large.onnx"}}))
    done = run("apply", folder / "f.json", folder / "m.onnx", "-o", folder / "o.onnx")
    assert (done.exit_code, (folder / "o.onnx").exists()) == (2, False)
    assert "f.json is a report of `refine`. Only compress is repeated" in done.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"reducer": "prune-swap"}, "reducer has no 'prune-swap' any more. Use prune, best with --selector obs"),
        ({"reducer": "fold-hartigan"}, "reducer has no 'fold-hartigan' any more. Use fold"),
        ({"refine": "regional"}, "refine has no 'regional' any more. Use laco"),
        ({"fit": ["behind"]}, "fit has no 'behind' any more. It is called downstream"),
        ({"plots": "figures"}, "there is no key 'plots' any more. --report page.html shows what the figures showed"),
    ],
)
def test_what_earlier_versions_had_is_told_with_what_to_use(content: dict[str, str], told: str, folder: Path) -> None:
    recipe = folder / "old.yaml"
    recipe.write_text(yaml.safe_dump(content))
    done = run("apply", recipe, folder / "m.onnx", "--data", folder / "d.npz")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.rstrip().endswith(told)


def test_a_report_of_an_earlier_version_is_told_with_what_to_use(folder: Path) -> None:
    report = folder / "old.json"
    done = run("compress", folder / "m.onnx", "--dry-run", "--data", folder / "d.npz", "--report", report, *CHOICES)
    assert done.exit_code == 0, done.output
    data = json.loads(report.read_text())
    data["recipe"]["reducer"] = "fold-hartigan"
    report.write_text(json.dumps(data))
    done = run("apply", report, folder / "m.onnx", "--data", folder / "d.npz")
    assert (done.exit_code, done.stderr) == (2, "Error: reducer has no 'fold-hartigan' any more. Use fold\n")


def test_options_of_earlier_versions_are_told_in_python(folder: Path) -> None:
    with pytest.raises(onnxgrail.errors.UsageError, match="no option 'plots' any more"):
        onnxgrail.compress(folder / "m.onnx", data=nets.vectors(), plots="figures")  # type: ignore[call-arg]
