"""Selectors, reducers and compensators of another package, installed as `tests/plugin` would be."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.calibration.feeds.kinds.kind import Kind, with_suffix
from onnxgrail.cli import main
from onnxgrail.core import BlockError, Change, Reducer, View
from onnxgrail.errors import DataError, UsageError
from onnxgrail.graph.ops import rule
from onnxgrail.graph.ops.rule import find_rule
from onnxgrail.registry import DATA_KINDS, REPORT_SECTIONS

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


BROKEN_RULES = {
    "raises": "@rule('Odd', domain='com.example')\ndef odd(site):\n    {}['inside']\n",
    "none": "",
    "twice": "for _ in range(2):\n    rule('Odd', domain='com.example')(print)\n",
}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raises", r"the package broken raised KeyError: 'inside' \(broken_raises.py:5\) at node 'odd'"),
        ("none", "the package broken is not there: broken_none registers none"),
        ("twice", "the package broken cannot be imported: two rules for Odd-1"),
        ("both", "broken and other both have a rule for com.example.Odd"),
    ],
)
def test_broken_rules_name_their_package(kind: str, words: str, plugin: Path) -> None:
    head = "from onnxgrail.graph.ops.rule import rule\n\n"
    (plugin / f"broken_{kind}.py").write_text(head + BROKEN_RULES.get(kind, ""))
    install(plugin, "broken", {"onnxgrail.ops": {"com.example.Odd": f"broken_{kind}"}})
    if kind == "both":
        install(plugin, "other", {"onnxgrail.ops": {"com.example.Odd": "elsewhere"}})
    node = onnx.helper.make_node("Odd", ["x"], ["y"], name="odd", domain="com.example")

    def visit() -> None:
        found = find_rule("com.example", "Odd", 1)
        assert found is not None
        found(SimpleNamespace(node=ir.from_proto(node)))  # type: ignore[arg-type]

    for _ in range(2):  # the second time, nothing of the first is left
        with pytest.raises(UsageError, match=words):
            visit()


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


class Odd:
    """A compensator that a program registers."""

    needs_data = False

    def __init__(self, change: Any, error: Any = None) -> None:
        self.change = change
        if error is not None:
            self.error = error

    def __call__(self, view: View, reducer: Reducer) -> Any:
        """Return a change that is wrong."""
        return Change(block=view.block, **{"reducer": reducer, **self.change(view, reducer)})


def consumers(view: View, reducer: Reducer, number: int, make: Callable[[Any], Any]) -> dict[str, Any]:
    slots = [place for place, slot in enumerate(view.block.slots) if slot.role == "consumer"]
    return {"weights": tuple((place + number, make(view.weights[place][reducer.kept])) for place in slots)}


def lowered(view: View, rng: np.random.Generator) -> Any:
    """Scores, made in the place of the weights."""
    weight = view.weights[0]
    weight -= weight.mean()
    return np.abs(weight).sum(axis=(1, 2))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v, r: {"reducer": Reducer(kept=r.kept[::2])}, r"does not keep \d+ different units of \d+"),
        (lambda v, r: {"reducer": Reducer(kept=np.zeros_like(r.kept))}, r"does not keep \d+ different units"),
        (lambda v, r: consumers(v, r, 99, np.copy), r"gave weights of slot 1\d\d, expected 0 to \d"),
        (lambda v, r: consumers(v, r, 0, lambda w: w.astype(object)), "finite numbers of float32"),
        (lambda v, r: consumers(v, r, 0, lambda w: w * 1e300), "finite numbers of float32"),
        (lambda v, r: consumers(v, r, 0, lambda w: [[1], [2, 3]]), "finite numbers of float32"),
    ],
)
def test_a_wrong_change_is_refused(change: Any, words: str) -> None:
    COMPENSATORS["odd"] = Odd(change)
    with pytest.raises(UsageError, match=f"compensate 'odd' .*{words}"):
        kept(nets.mlp(), compensate="odd", selector="l1")


@pytest.mark.usefixtures("plugin")
def test_a_compensator_may_compute_errors_alone() -> None:
    seen = []

    def error(view: View, reducer: Reducer) -> BlockError:
        seen.append(view.block.name)
        return BlockError(plain=1 - len(reducer.kept) / view.block.units)

    choices: dict[str, Any] = {"unit_ratio": None, "ratio": 0.3, "allocate": "global", "selector": "l1"}
    COMPENSATORS["odd"] = Odd(lambda view, reducer: {}, error)
    assert kept(nets.mlp(), compensate="odd", **choices)
    assert seen
    COMPENSATORS["odd"] = Odd(lambda view, reducer: {}, lambda view, reducer: 0.5)
    with pytest.raises(UsageError, match="error of compensate 'odd' gave a float, expected a BlockError"):
        kept(nets.mlp(), compensate="odd", **choices)


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("scores", ["text", 1j, [1, [2]]])
def test_scores_that_are_not_real_numbers_are_refused(scores: Any) -> None:
    SELECTORS["mine"] = type("Mine", (), {"needs_data": False, "__call__": lambda self, view, rng: [scores] * 32})()
    with pytest.raises(UsageError, match=r"selector 'mine' gave scores of shape .* finite numbers"):
        kept(nets.mlp(), selector="mine")


@pytest.mark.usefixtures("plugin")
def test_weights_can_only_be_read() -> None:
    SELECTORS["mine"] = type("Mine", (), {"needs_data": False, "__call__": staticmethod(lowered)})()
    with pytest.raises(UsageError, match=r"selector 'mine' raised ValueError: .*read-only \(test_plugins.py"):
        kept(nets.mlp(), selector="mine")


def test_our_own_names_cannot_be_taken(plugin: Path) -> None:
    assert kept(nets.mlp(), selector="wanda")  # the package has one of that name, which would fail


def broken(*_: Any) -> Any:
    raise KeyError("inside")


def test_a_broken_section_leaves_the_rest_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REPORT_SECTIONS.data, "mine", broken)
    files = [tmp_path / "r.html", tmp_path / "r.json"]
    onnxgrail.compress(nets.mlp(), data=nets.vectors(), report=files, **CHOICES | {"selector": "l1"})
    assert "This section raised KeyError: &#x27;inside&#x27; (test_plugins.py:" in files[0].read_text()
    assert files[1].exists()


def test_a_broken_reader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA_KINDS.data, ".zzz", Kind(with_suffix(".zzz"), broken))
    (tmp_path / "a.zzz").touch()
    with pytest.raises(DataError, match=r"kind '.zzz': its reader raised KeyError: 'inside' \(test_plugins.py:"):
        onnxgrail.compress(nets.mlp(), data=tmp_path / "a.zzz", **CHOICES | {"selector": "l1"})
    (tmp_path / "rows.csv").touch()
    np.savez(tmp_path / "other.npz", **nets.vectors())  # the folder could be read, but not this file in it
    with pytest.raises(DataError, match=r"the kind '\.csv' is not known. Give file.py:function"):
        onnxgrail.compress(nets.mlp(), data=tmp_path / "rows.csv", **CHOICES | {"selector": "l1"})
