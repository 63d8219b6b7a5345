"""Limits on what shared files may contain: numbers, choices, and, for a recipe file, data in its own folder.

Recipes, reports and models come from other people.  Nothing in them can run code, import a plug-in, load a library, or
name a file to read or write outside the recipe's folder.  All of that must come from the command line or from the
keywords of a Python call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxgrail.errors import UsageError
from onnxgrail.machine.device import CUDA
from onnxgrail.machine.scripts import is_named

FILES = ("tokenizer", "keep_tokens")  # fields of `Recipe` that name a file
PLACES = ("data", "held_out", *FILES)  # keys of a recipe file that may name a path inside its folder
COMMAND_ONLY = ("custom_ops", "metric")  # keys that no file may contain, because they run code
PROVIDERS = ("CPUExecutionProvider", CUDA)  # other providers load libraries of their own
WORDS = {"data": "data", "held_out": "held-out data", "tokenizer": "tokenizer", "keep_tokens": "ids of tokens"}
INSTEAD = {name: f"--{name.replace('_', '-')} {'FILE' if name in FILES else 'DATA'}" for name in PLACES}
INSTEAD["output"] = "OUT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The origin of a recipe.

    Attributes:
        label: its name in messages.
        folder: the folder of a recipe file; None for a report, a model or a mapping, which may not name any files.
    """

    label: str
    folder: Path | None = None


def place(origin: Origin, name: str, text: str) -> str:
    """Return the path of a file that a recipe names.

    Args:
        origin: of the recipe.
        name: one of `PLACES`.
        text: the path in the recipe, relative to its folder.

    Raises:
        UsageError: it is not a file or folder inside the recipe's folder, links resolved, or it names code.
    """
    says = f"{origin.label} names the {WORDS[name]} {text!r}"
    hint = f"Give {INSTEAD[name]} to use it"
    if origin.folder is None:
        raise UsageError(f"{says}, and only a recipe file may name what is read", hint=hint)
    try:
        found = (origin.folder / text).resolve()
        there, inside = found.exists(), _inside(origin.folder.resolve(), found)
    except (OSError, ValueError, RuntimeError) as error:  # also circular links, and impossible names
        raise UsageError(f"{says}, which is not a path: {error}", hint=hint) from error
    # Check the resolved name, not only the text: `evil.py:f/` and links to a file of such a name are code.
    if is_named(text) or is_named(str(found)):
        raise UsageError(f"{says}, which is code, and no recipe runs code", hint=hint)
    if not inside:
        raise UsageError(f"{says}, which is outside of the recipe's folder", hint=hint)
    if not there:
        raise UsageError(f"{says}, and its folder has no such file", hint=f"Give {INSTEAD[name]}")
    return str(found)


def _inside(folder: Path, path: Path) -> bool:
    """Return True if a path, and all links in it if it is a folder, lie in `folder`; both paths are resolved."""
    if not path.is_relative_to(folder):
        return False
    if not path.is_dir():
        return True
    entries = (Path(parent, name) for parent, folders, files in os.walk(path) for name in (*folders, *files))
    return all(entry.resolve().is_relative_to(folder) for entry in entries if entry.is_symlink())


def check_output(origin: Origin, text: str) -> None:
    """Refuse an output path in a recipe.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{origin.label} names the output {text!r}, and recipes do not say where files are written",
        hint=f"Give {INSTEAD['output']}, or take the key `output` out of the recipe",
    )


def check_choice(origin: Origin, name: str, value: Any) -> None:
    """Refuse a choice of a recipe that would run or load something.

    Raises:
        UsageError: it names code, a library, or an execution provider other than CPU and CUDA.
    """
    option = "--" + name.replace("_", "-")
    if name in COMMAND_ONLY:
        raise UsageError(f"{origin.label}: {name} is never taken from a file", hint=f"Give {option} in the command")
    words = value if isinstance(value, list | tuple) else (value,)
    if any(isinstance(word, str) and is_named(word) for word in words):
        raise UsageError(f"{origin.label}: {name} is {value!r}, which is code, and no recipe runs code")
    if name == "providers":
        odd = [word for word in words if str(word).partition(":")[0] not in PROVIDERS]
        if odd:
            raise UsageError(
                f"{origin.label} names the execution provider {odd[0]!r}, and only {' and '.join(PROVIDERS)} are "
                "taken from a file",
                hint="Give --device or --providers in the command",
            )


def relative(source: Any, folder: Path) -> tuple[str | None, str]:
    """Return the path of data relative to a recipe's folder, and, if it must be left out, None and the reason.

    Args:
        source: the user's argument: a path, `file.py:function` or arrays; None if not given.
        folder: of the recipe.
    """
    if source is None:
        return None, ""
    if not isinstance(source, str | os.PathLike):
        return None, "came as arrays of a Python call"
    if is_named(os.fspath(source)):
        return None, "is code, and no recipe runs code"
    found, root = Path(source).resolve(), folder.resolve()
    if not _inside(root, found):
        return None, "lies outside of the recipe's folder"
    return found.relative_to(root).as_posix(), ""
