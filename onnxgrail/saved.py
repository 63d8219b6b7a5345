"""Recipes that outlive their run: in the written model, in files of YAML or JSON, and back to choices."""

from __future__ import annotations

import dataclasses
import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.graph import model_io
from onnxgrail.paths import check_input, write_text
from onnxgrail.report import SCHEMA, plain

KEY = "onnxgrail.recipe"  # of the metadata of a model: a list of the runs that made it, the first one first
BESIDE = ("data", "held_out", "output", "onnxgrail")  # what a recipe file holds beside the choices
SYNONYMS = {"calib": "data", "sparsity": "ratio"}  # as on the command line
FIELDS = {field.name: str(field.type) for field in dataclasses.fields(Recipe)}
SUFFIXES = (".yaml", ".yml", ".json")
KINDS = "Give a file of --save-recipe, a JSON report, or a model that onnxgrail wrote"


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a recipe file says: choices for `compress`, and data, held-out data and output where it names them."""

    choices: Mapping[str, Any]
    data: str | None = None
    held_out: str | None = None
    output: str | None = None


def mark(model: ir.Model, recipe: Recipe, *, command: str = "compress") -> None:
    """Write into a model how it was made, behind what it says already.

    Places of files are left out: they say something about a machine, and the same run elsewhere gives the same bytes.
    """
    entry = {"command": command, "version": metadata.version("onnxgrail"), "recipe": plain(dataclasses.asdict(recipe))}
    model.metadata_props[KEY] = json.dumps([*runs(model), entry], sort_keys=True)


def runs(model: ir.Model) -> list[Mapping[str, Any]]:
    """The runs that made a model, the first one first; nothing where another tool wrote it."""
    try:
        found = json.loads(model.metadata_props.get(KEY, "[]"))
    except (ValueError, RecursionError):  # somebody else's note under our name
        return []
    return [run for run in found if _is_run(run)] if isinstance(found, list) else []


def _is_run(run: Any) -> bool:
    return isinstance(run, Mapping) and "command" in run and isinstance(run.get("recipe"), Mapping)


def save(path: Path, recipe: Recipe, *, data: str | None, output: str | None, held_out: str | None = None) -> None:
    """Write a recipe file, as YAML or as JSON by its suffix.

    Raises:
        OutputError: the file cannot be written.
    """
    content = {
        "onnxgrail": metadata.version("onnxgrail"),
        **plain(dataclasses.asdict(recipe)),
        "data": data,
        "held_out": held_out,
        "output": output,
    }
    if path.suffix.lower() == ".json":
        write_text(path, json.dumps(content, indent=1) + "\n")
        return
    import yaml

    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def check_suffix(path: Path) -> None:
    """Whether a recipe file says by its name how it is written.

    Raises:
        UsageError: it does not.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"recipe {str(path)!r} has an unknown suffix", hint=f"Choose from {', '.join(SUFFIXES)}")


def read(source: str | Path | Mapping[str, Any] | Recipe) -> Saved:
    """A recipe from a file (a recipe, a JSON report, or a model that onnxgrail wrote), a mapping or a `Recipe`.

    Raises:
        UsageError: a key is unknown or a value is of the wrong kind; both are named.
        ModelError: there is no such file, or it is a model without a recipe.
    """
    if isinstance(source, Recipe):
        return Saved(choices=dataclasses.asdict(source))
    if isinstance(source, Mapping):
        return _saved(source, "the recipe")
    path = Path(source)
    check_input(path, KINDS)
    if path.suffix.lower() == ".onnx":
        return _of_model(path)
    check_suffix(path)
    found = _parsed(path)
    if not isinstance(found, Mapping):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise UsageError(f"{path} holds {what}, expected keys and values such as `ratio: 0.3`")
    if found.get("schema") == SCHEMA and isinstance(found.get("recipe"), Mapping):  # a report
        calibration = found.get("calibration") or {}
        data = None if calibration.get("synthetic", True) else calibration.get("source")
        held = ((found.get("verification") or {}).get("held_out") or {}).get("asked")
        return _saved({**found["recipe"], "data": data, "held_out": held}, str(path))
    return _saved(found, str(path))


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            return json.loads(text, object_pairs_hook=_once)
        import yaml

        try:
            _keys_once(yaml.compose(text, yaml.SafeLoader))
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        raise UsageError(f"{path} cannot be read as a recipe: {error}") from error


def _keys_once(root: Any) -> None:
    """Refuse YAML in which a key stands twice, the last of which would be taken without a word, and merged keys.

    Merges of merges grow without end, and a recipe has nothing to merge.
    """
    seen: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        pairs = [pair for pair in node.value if isinstance(pair, tuple)]
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in pairs):
            raise ValueError("the key '<<' is not taken: write out what it would merge")
        _once((key.value, None) for key, _ in pairs if isinstance(key.value, str))
        todo += [value for _, value in pairs] or node.value


def _once(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Keys with their values; a key that stands twice is an error."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {str(key)!r} stands twice")
        found[key] = value
    return found


def _of_model(path: Path) -> Saved:
    made = runs(model_io.load(path))
    if not made:
        raise UsageError(f"{path} holds no recipe", hint="Only models that onnxgrail wrote say how they were made")
    last = made[-1]
    if last.get("command") != "compress":
        raise UsageError(
            f"the last command that wrote {path} is {last.get('command')!r}", hint="Only compress is repeated"
        )
    return _saved(last["recipe"], str(path))


def _saved(content: Mapping[Any, Any], label: str) -> Saved:
    choices: dict[str, Any] = {}
    beside: dict[str, str] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = SYNONYMS.get(name, name)
        if name in BESIDE:
            beside |= _place(name, value, label)
        elif name in FIELDS:
            choices[name] = _checked(name, value, label)
        else:
            raise UsageError(f"{label}: there is no key {str(key)!r}", hint=nearest(name))
    return Saved(choices=choices, **{name: beside.get(name) for name in ("data", "held_out", "output")})


def _place(name: str, value: Any, label: str) -> dict[str, str]:
    """Where something is, as text; the version that wrote a file is not asked for."""
    if value is None or name == BESIDE[-1]:
        return {}
    number = name == "held_out" and isinstance(value, int) and not isinstance(value, bool)
    if not number and not isinstance(value, str | Path):
        raise _wrong(label, name, value, "text")
    return {name: str(value)}


def nearest(name: str) -> str:
    """A hint with the key that was probably meant."""
    known = (*FIELDS, *BESIDE[:-1])
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(sorted(known))}"


def _checked(name: str, value: Any, label: str) -> Any:
    """A value of the kind that its key takes; None leaves the default."""
    kind = FIELDS[name]
    if value is None:
        return None
    if kind.startswith("Mapping"):
        if isinstance(value, Mapping) and all(_all_are(int, dims) for dims in value.values()):
            return {str(key): tuple(dims) for key, dims in value.items()}
        raise _wrong(label, name, value, "input names with lists of sizes")
    if kind.startswith(("float", "tuple[float")):
        return _numbers(kind, name, value, label)
    if kind.startswith("tuple"):
        if isinstance(value, str) or _all_are(str, value):
            return value
        raise _wrong(label, name, value, "a list of words")
    if kind.startswith("bool") and not isinstance(value, bool):
        raise _wrong(label, name, value, "true or false")
    if kind.startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong(label, name, value, "a whole number")
    if kind.startswith("str"):
        amount = name.startswith("target_") and isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, str) and not amount:
            raise _wrong(label, name, value, "text")
    return value


def _numbers(kind: str, name: str, value: Any, label: str) -> Any:
    """One number or several, also where YAML takes them for words, as 1e-3."""
    alone = kind.startswith("float")
    several = value.split(",") if isinstance(value, str) and not alone else value
    if alone or not isinstance(several, list | tuple):
        several = [several]
    try:
        found = tuple(float(number if not isinstance(number, bool) else "no number") for number in several)
    except (TypeError, ValueError):
        raise _wrong(label, name, value, "a number" if alone else "a number, or a list of numbers") from None
    return found[0] if alone else found


def _all_are(kind: type, values: Any) -> bool:
    """Whether something is a list of things of a kind."""
    return isinstance(values, list | tuple) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )


def _wrong(label: str, name: str, value: Any, expected: str) -> UsageError:
    short = reprlib.Repr()  # aliases make a little YAML into values without end
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    return UsageError(f"{label}: {name} is {short.repr(value)}, expected {expected}")
