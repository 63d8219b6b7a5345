"""Selectors, reducers and compensators of another package, installed as `tests/plugin` would be."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.cli import main
from onnxgrail.core import View
from onnxgrail.errors import UsageError
from onnxgrail.graph.ops import rule
from onnxgrail.graph.ops.rule import find_rule

from . import nets

PACKAGE = Path(__file__).resolve().parents[1] / "plugin"
CHOICES: dict[str, Any] = {"unit_ratio": 0.5, "round_to": 1, "compensate": "none", "selector": "largest"}


def install(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Write the metadata of a package as pip does."""
    place = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in e.items()) for group, e in groups.items()]
    (place / "entry_points.txt").write_text("\n\n".join(lines) + "\n")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    install(tmp_path, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(SELECTORS), dict(REDUCERS), dict(COMPENSATORS)
    rules = dict(rule._RULES)
    rule._plugins.cache_clear()
    yield tmp_path
    rule._plugins.cache_clear()
    rule._import_plugin.cache_clear()
    for op in set(rule._RULES) - set(rules):
        del rule._RULES[op]
    for known, old in zip((SELECTORS, REDUCERS, COMPENSATORS), before, strict=True):
        for name in set(known) - set(old):
            del known[name]


def kept(model: Any, **choices: Any) -> list[list[int]]:
    report = onnxgrail.compress(model, data=nets.vectors(), **{**CHOICES, **choices}).report
    return [block["kept_units"] for block in report.data["blocks"]]


def test_a_selector_of_another_package_chooses(plugin: Path) -> None:
    weights = nets.weights_of(nets.mlp())
    report = onnxgrail.compress(nets.mlp(), data=nets.vectors(), **CHOICES).report
    block = report.data["blocks"][0]  # later ones have lost inputs before they are looked at
    (producer,) = (m for m in block["members"] if m["role"] == "producer")
    weight = np.moveaxis(weights[producer["initializer"]], producer["axis"], 0)
    scores = np.abs(weight).reshape(len(weight), -1).max(axis=1)
    assert 0 < block["kept"] < block["units"]
    assert block["kept_units"] == sorted(np.argsort(scores)[-block["kept"] :].tolist())
    assert kept(nets.mlp()) != kept(nets.mlp(), selector="random")


def test_a_rule_of_another_package_is_imported_for_its_op(plugin: Path) -> None:
    (plugin / "twice_rule.py").write_text(
        "from onnxgrail.graph.ops.rule import rule\n\n\n"
        "@rule('Twice', domain='com.example')\n"
        "def twice(site):\n    site.emit(site.marks(0))\n"
    )
    install(
        plugin, "ops-of-mine", {"onnxgrail.ops": {"com.example.Twice": "twice_rule", "com.example.Lost": "nowhere"}}
    )
    assert find_rule("com.example", "Other", 1) is None
    assert "twice_rule" not in sys.modules
    found = find_rule("com.example", "Twice", 1)
    assert found is not None
    assert found.__module__ == "twice_rule"
    with pytest.raises(UsageError, match="the package ops-of-mine cannot be imported: No module named 'nowhere'"):
        find_rule("com.example", "Lost", 1)


def test_a_compensator_of_another_package_writes_weights(plugin: Path) -> None:
    plain = onnxgrail.compress(nets.mlp(), data=nets.vectors(), **CHOICES)
    scaled = onnxgrail.compress(nets.mlp(), data=nets.vectors(), **{**CHOICES, "compensate": "rescale"})
    one, two = (nets.weights_of(result.proto()) for result in (plain, scaled))
    (first, *_) = plain.report.data["blocks"]
    consumer = next(m["initializer"] for m in first["members"] if m["role"] == "consumer")
    factor = first["units"] / first["kept"]
    np.testing.assert_allclose(two[consumer], one[consumer] * factor, rtol=1e-6)


def test_the_command_takes_their_names(plugin: Path, tmp_path: Path) -> None:
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    words = ["compress", str(tmp_path / "m.onnx"), "--ratio=0.3", "--dry-run", "-q", "--compensate"]
    assert CliRunner().invoke(main, [*words, "rescale", "--selector", "largest"]).exit_code == 0
    wrong = CliRunner().invoke(main, [*words, "rescale", "--selector", "smallest"])
    assert wrong.exit_code == 2
    assert "--selector" in wrong.stderr
    assert "'random', 'crooked', 'largest'." in wrong.stderr
    crooked = CliRunner().invoke(main, [*words, "none", "--selector", "crooked"])
    assert crooked.exit_code == 2
    assert "selector 'crooked' of onnxgrail-example gave scores of shape [1]" in crooked.stderr


def test_what_is_no_plugin_is_named(plugin: Path) -> None:
    install(plugin, "other-package", {"onnxgrail.selectors": {"largest": "x:Y", "lost": "absent_module:Z"}})
    install(plugin, "third", {"onnxgrail.selectors": {"number": "math:pi"}})
    for choice, words in (
        ({"selector": "largest"}, "is in onnxgrail-example and other-package"),
        ({"selector": "lost"}, "of other-package cannot be loaded: ModuleNotFoundError"),
        ({"selector": "number"}, "of third is not a plug-in"),
        ({"compensate": "nothing", "selector": "l1"}, "gave a ndarray, expected an onnxgrail.core.Change"),
        (
            {"reducer": "twice", "selector": "l1"},
            r"of onnxgrail-example does not keep \d+ different units of \d+",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            kept(nets.mlp(), **choice)


def test_a_reducer_of_another_package_keeps_units(plugin: Path) -> None:
    for units in kept(nets.mlp(), reducer="thirds"):
        assert [unit for unit in units if unit % 3 == 0] == list(range(0, 3 * sum(unit % 3 == 0 for unit in units), 3))


class Broken:
    """A selector that a program registers."""

    needs_data = False

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, view: View, rng: np.random.Generator) -> Any:
        """Scores that are wrong."""
        if self.result is None:
            raise KeyError("nothing")
        return np.full(view.block.units, self.result)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (Broken(np.nan), r"selector 'mine' gave scores of shape .* finite numbers"),
        (Broken(None), r"selector 'mine' raised KeyError: 'nothing' \(test_plugins.py:\d+\)"),
        (Broken, r"selector 'mine' is a class. Register an object: Broken\(\)"),
        (len, "selector 'mine' is not a plug-in"),
    ],
)
def test_what_a_program_registers_is_checked(selector: Any, words: str) -> None:
    SELECTORS["mine"] = selector
    with pytest.raises(UsageError, match=words):
        kept(nets.mlp(), selector="mine")


def test_our_own_names_cannot_be_taken(plugin: Path) -> None:
    assert kept(nets.mlp(), selector="wanda")  # the package has one of that name, which would fail
