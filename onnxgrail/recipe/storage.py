"""Save recipes in the written model and in files of YAML or JSON, and read them back.

`trust.py` decides what a recipe may contain.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError, meant
from onnxgrail.graph.io import model_file
from onnxgrail.graph.notes import without_notes
from onnxgrail.machine.amounts import whole
from onnxgrail.machine.files.paths import check_input, write_text
from onnxgrail.machine.plain import SCHEMA, plain
from onnxgrail.recipe import keywords, trust
from onnxgrail.recipe.effort import EFFORTS, filled
from onnxgrail.recipe.parsing import parsed
from onnxgrail.recipe.plugins import GROUPS, foreign
from onnxgrail.recipe.table import AMOUNTS, FIELDS, OPTIONS
from onnxgrail.recipe.trust import FILES, PLACES, Origin

REPEATED = "Only compress is repeated"
KEY = "onnxgrail.recipe"  # metadata key: a list of the runs that made the model, in order
AUTO = "auto"  # how a run requests held-out samples by default
WITHOUT = "without"  # key: what the run had and the file does not name: data, held-out data, a metric
BESIDE = ("data", "held_out", "output", "onnxgrail")  # keys that a recipe file may have besides the choices
SYNONYMS = {word.strip("-"): name for name, row in OPTIONS.items() for word in row.also if word.startswith("--")}
SUFFIXES = (".yaml", ".yml", ".json")
KINDS = "Give a file of --save-recipe, a JSON report, or a model that onnxgrail wrote"


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The content of a recipe: choices for `compress`, unchecked paths as text, and what it leaves out."""

    origin: Origin
    choices: Mapping[str, Any]
    named: Mapping[str, str]
    without: tuple[str, ...] = ()

    def place(self, name: str) -> str | None:
        """Return the data, the held-out data (or their number) or another file; None if the recipe names none.

        Args:
            name: one of `PLACES`.

        Raises:
            UsageError: a recipe may not name this file.
        """
        text = self.named.get(name)
        if text is None or (name == "held_out" and _count(text)):
            return text
        return trust.place(self.origin, name, text)

    def check_given(self, **given: Any) -> None:
        """Refuse to repeat a run without its data, its held-out data or its metric: the result would be another one.

        Raises:
            UsageError: one of them is None, and the run had one.
        """
        for name in self.without:
            if given.get(name) is None:
                what = f"{self.origin.label} is of a run with {trust.WORDS.get(name, name)}, which it does not name"
                raise UsageError(what, hint=f"Give {trust.INSTEAD.get(name, '--metric FILE.py:FUNCTION')}")

    def check_output(self) -> None:
        """Refuse a recipe that names an output file.

        Raises:
            UsageError: it does.
        """
        if "output" in self.named:
            trust.check_output(self.origin, self.named["output"])

    def check_plugins(self, instead: Collection[str]) -> None:
        """Refuse a recipe that names a plug-in: only a command or a call may import a plug-in.

        Args:
            instead: options that the command or the call gives itself.

        Raises:
            UsageError: it names a plug-in.
        """
        for option in GROUPS:
            name = self.choices.get(option)
            if name is not None and option not in instead and foreign(option, name):
                raise UsageError(
                    f"{self.origin.label} names the {option} {name!r} of another package, and no recipe loads plug-ins",
                    hint=f"If you trust it, give --{option} {name}",
                )


def mark(model: ir.Model, recipe: Recipe, *, command: str = "compress", held_out: Any = None) -> None:
    """Append a run to the list of runs in a model's metadata.

    Folders are left out: they depend on the machine, and the same run must give the same bytes everywhere.  If the size
    of the file decides, notes of exporters go: they take bytes, and no runtime reads them.

    Args:
        model: is changed in place.
        recipe: the choices.
        command: name of the command.
        held_out: the argument of the run; of data, only that there were some is stored, where the result needs them.
    """
    ids = None if recipe.keep_tokens is None else Path(recipe.keep_tokens).name
    choices = {**dataclasses.asdict(recipe), "tokenizer": None, "keep_tokens": ids}
    fixed = recipe.unit_ratio is not None or recipe.widths is not None or recipe.keeps_everything
    choices |= {} if _usual(held_out) else _held(held_out, judging=not fixed or bool(recipe.refine))
    entry = {"command": command, "version": metadata.version("onnxgrail"), "recipe": plain(choices)}
    model.metadata_props[KEY] = json.dumps([*runs(model), entry], sort_keys=True)
    if recipe.wants_size:
        without_notes(model)


def shorten(model: ir.Model) -> None:
    """Remove default values from the last entry, to save bytes.

    The amount stays. What the effort fills in counts as a default, but for refinements, which depend on torch.
    """
    *others, last = runs(model)
    chosen, usual = last["recipe"], plain(dataclasses.asdict(Recipe()))
    first = {name: chosen[name] for name in ("effort", "compensate", "max_loss") if chosen[name] != usual[name]}
    usual |= {name: value for name, value in filled(first).items() if name not in first}
    stay = {name for name in (*AMOUNTS, "only_widths") if chosen[name] is not None}
    stay |= {"refine"} & EFFORTS[chosen["effort"]].keys()
    choices = {name: value for name, value in chosen.items() if name in stay or value != usual.get(name)}
    model.metadata_props[KEY] = json.dumps([*others, {**last, "recipe": choices}], sort_keys=True)


def runs(model: ir.Model) -> list[Mapping[str, Any]]:
    """Return the runs that made a model, in order; empty if another tool wrote it."""
    try:
        found = json.loads(model.metadata_props.get(KEY, "[]"))
    except (ValueError, RecursionError):  # another tool's metadata under our key
        return []
    made = [run for run in found if isinstance(run, Mapping) and "command" in run] if isinstance(found, list) else []
    return [run for run in made if isinstance(run.get("recipe"), Mapping)]


def save(path: Path, recipe: Recipe, *, data: Any = None, held_out: Any = None, metric: Any = None) -> list[str]:
    """Write a recipe file, as YAML or JSON according to its suffix.

    Data, held-out data, the tokenizer and ids of tokens are named relative to the file's folder if they are inside it.

    Args:
        path: of the recipe.
        recipe: the choices.
        data: the `data` argument of the run.
        held_out: held-out data, or their number of samples.
        metric: the user's own loss, None without one.

    Returns:
        A note for each path that is left out.

    Raises:
        OutputError: the file cannot be written.
    """
    given = {"data": data, "held_out": held_out, **{name: getattr(recipe, name) for name in FILES}}
    places, why = {}, {}
    for name in PLACES:
        places[name], reason = (str(held_out), "") if _count(given[name]) else trust.relative(given[name], path.parent)
        if reason:
            why[name] = f"the {trust.WORDS[name]}, which {reason}: give {trust.INSTEAD[name]} to `onnxgrail apply`"
    left = [*(name for name in ("data", "held_out") if name in why), *([] if metric is None else ["metric"])]
    content = {
        "onnxgrail": metadata.version("onnxgrail"),
        **plain(dataclasses.asdict(recipe)),
        **places,
        **({WITHOUT: left} if left else {}),
    }
    if path.suffix.lower() == ".json":
        write_text(path, json.dumps(content, indent=1) + "\n")
    else:
        import yaml

        comments = "".join(f"# Left out: {text}\n" for text in why.values())
        write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True) + comments)
    return [f"{path.name} leaves out {text}" for text in why.values()]


def _held(held_out: Any, *, judging: bool) -> dict[str, Any]:
    """Return the entry on held-out samples; data of their own that choose nothing leave all others to fits."""
    if _count(held_out):
        return {"held_out": str(held_out)}
    return {WITHOUT: ["held_out"]} if judging else {"held_out": "0"}


def _usual(held_out: Any) -> bool:
    return held_out is None or (isinstance(held_out, str) and held_out.strip().lower() == AUTO)


def _count(held_out: Any) -> bool:
    """Return True for a number of held-out samples, as number or as text."""
    if not isinstance(held_out, str):
        return isinstance(held_out, int)
    return whole(held_out) is not None or held_out.strip().lower() in ("none", AUTO)


def check_suffix(path: Path) -> None:
    """Check that the suffix of a recipe file is known.

    Raises:
        UsageError: it is not.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"recipe {str(path)!r} has an unknown suffix", hint=f"Choose from {', '.join(SUFFIXES)}")


def read(source: Any) -> Saved:
    """Read a recipe from a file (a recipe, a JSON report, or a model that onnxgrail wrote), such a model, or a mapping.

    Raises:
        UsageError: a key is unknown or a value has the wrong type; the message names both.
        ModelError: there is no such file, or it is a model without a recipe.
    """
    if isinstance(source, Mapping):
        return _of_mapping(source, Origin(label="the recipe"))
    if isinstance(source, bytes | onnx.ModelProto | ir.Model):
        return _of_model(source, "the model")
    if not isinstance(source, str | Path):
        raise UsageError(f"a recipe of type {type(source).__name__} is not known", hint=KINDS)
    path = Path(source)
    check_input(path, KINDS)
    if path.suffix.lower() == ".onnx":
        return _of_model(path, str(path))
    check_suffix(path)
    found = parsed(path, KINDS)
    if not isinstance(found, Mapping):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise UsageError(f"{path} holds {what}, expected keys and values such as `ratio: 0.3`")
    return _of_mapping(found, Origin(label=str(path), folder=path.parent))


def _of_mapping(found: Mapping[str, Any], origin: Origin) -> Saved:
    if "schema" not in found:
        return _saved(found, origin)
    if found["schema"] != SCHEMA or not isinstance(found.get("recipe"), Mapping):
        raise UsageError(f"{origin.label} is no report of a run of `compress`", hint=KINDS)
    if "reference" in found:
        raise UsageError(f"{origin.label} is a report of `refine`", hint=REPEATED)
    return _of_report(found, origin.label)


def _of_report(report: Mapping[str, Any], label: str) -> Saved:
    """Return the choices and the data paths of a report."""
    calibration, verification = (_part(report, key) for key in ("calibration", "verification"))
    data = None if calibration.get("synthetic", True) else calibration.get("source")
    asked = (_part(verification, "judged") or _part(verification, "held_out")).get("asked")
    held = None if asked == AUTO else asked
    return _saved({**report["recipe"], "data": data, "held_out": held}, Origin(label=label))


def _part(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = report.get(key)
    return found if isinstance(found, Mapping) else {}


def _of_model(source: model_file.Source, label: str) -> Saved:
    made = runs(model_file.load(source))
    if not made:
        raise UsageError(f"{label} holds no recipe", hint="Only models that onnxgrail wrote say how they were made")
    last = made[-1]
    if last.get("command") != "compress":
        raise UsageError(f"the last command that wrote {label} is {last.get('command')!r}", hint=REPEATED)
    return _saved(last["recipe"], Origin(label=label))


def _saved(content: Mapping[Any, Any], origin: Origin) -> Saved:
    choices: dict[str, Any] = {}
    named: dict[str, str] = {}
    without: tuple[str, ...] = ()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = SYNONYMS.get(name, name)
        if name == WITHOUT:
            without = keywords.read_as(keywords.words, name, value, origin.label)
        elif name in BESIDE or name in PLACES:
            named |= _place(name, value, origin.label)
        elif name in FIELDS or name in trust.COMMAND_ONLY:
            trust.check_choice(origin, name, value)
            choices[name] = keywords.read(name, value, origin.label)
        else:
            keywords.check_gone(name, f"{origin.label}: there is no key {str(key)!r} any more")
            raise UsageError(f"{origin.label}: there is no key {str(key)!r}", hint=nearest(name))
    return Saved(origin=origin, choices=choices, named=named, without=without)


def _place(name: str, value: Any, label: str) -> dict[str, str]:
    """Return the path of a key as text; empty for None and for the key of the version."""
    if value is None or name == BESIDE[-1]:
        return {}
    if name == "held_out" and isinstance(value, int) and not isinstance(value, bool):
        return {name: str(keywords.read_as(keywords.whole, name, value, label))}
    if not isinstance(value, str | Path):
        raise keywords.odd(name, value, label, "text")
    return {name: str(value)}


def nearest(name: str) -> str:
    """Return a hint with the most similar key, or all keys."""
    known = (*FIELDS, *BESIDE[:-1])
    return meant(name, known) or f"Known keys: {', '.join(sorted(known))}"
