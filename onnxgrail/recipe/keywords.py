"""Check and convert the types of keywords of library calls and of keys of recipes, before any work.

Ranges and known words are checked by `check.py`; here a value only gets the required type.
"""

from __future__ import annotations

import errno
import functools
import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from onnxgrail.errors import OnnxGrailError, UsageError
from onnxgrail.recipe.table import OPTIONS
from onnxgrail.recipe.table.option import Kind

P = ParamSpec("P")
R = TypeVar("R")
Reader = Callable[[Any], Any]
CLOSED = frozenset({errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP})  # paths that cannot be looked up
LIMIT = 2**63  # bound on the absolute value of whole numbers
GONE = {
    "plots": "--report page.html shows what the figures showed",
    "prune-swap": "Use prune, best with --selector obs",
    "fold-hartigan": "Use fold",
    "regional": "Use laco",
    "behind": "It is called downstream",
}
"""Hints for options and choices that earlier versions had."""


class _OddError(Exception):
    """A value has the wrong type; the text is what was expected."""


def flag(value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool | np.bool_):
        raise _OddError("true or false")
    return bool(value)


def whole(value: Any) -> int:
    """Read a whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _OddError("a whole number")
    found = int(value)
    if abs(found) >= LIMIT:
        raise _OddError(f"a whole number below {LIMIT}")
    return found


def number(value: Any) -> float:
    """Read a number, also from text: YAML parses 1e-3 as text."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise _OddError("a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise _OddError("a number") from None


def several(value: Any) -> tuple[float, ...]:
    """Read one or more finite numbers."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, numbers.Real) else value
    try:
        found = tuple(map(number, _items(parts)))
    except _OddError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise _OddError("a number, or a list of numbers")
    return found


def text(value: Any) -> str:
    """Read text."""
    if not isinstance(value, str):
        raise _OddError("text")
    return value


def pattern(value: Any) -> str:
    """Read a regular expression, or a list of them, of which one has to match."""
    if isinstance(value, str):
        return value
    try:
        return "|".join(f"(?:{part})" for part in names(value))
    except _OddError:
        raise _OddError("text, or a list of texts") from None


def amount(value: Any) -> str:
    """Read an amount, text or a number, as text."""
    if isinstance(value, str):
        return value
    found = number(value)
    return str(whole(value)) if isinstance(value, numbers.Integral) else f"{found:f}".rstrip("0").rstrip(".")


def portion(value: Any) -> float:
    """Read a share: a number, or a text such as 1%."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return number(value.strip()[:-1]) / 100
    return number(value)


def names(value: Any) -> tuple[str, ...]:
    """Read one name, or a list of names."""
    found = [value] if isinstance(value, str) else _items(value)
    if not all(isinstance(name, str) for name in found):
        raise _OddError("a list of words")
    return tuple(map(str, found))


def words(value: Any) -> tuple[str, ...]:
    """Read words: a text with commas between them, or a list of texts."""
    return names([word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value)


def layers(value: Any) -> str:
    """Read a number of layers, or their names, as text."""
    return str(whole(value)) if isinstance(value, numbers.Integral) else ",".join(names(value))


def _mapping(read: Reader, expected: str) -> Reader:
    """Return the reader of a mapping of names to values."""

    def found(value: Any) -> Mapping[str, Any]:
        try:
            return {text(name): read(one) for name, one in value.items()}
        except (_OddError, AttributeError):
            raise _OddError(expected) from None

    return found


def wholes(value: Any) -> tuple[int, ...]:
    """Read a list of whole numbers."""
    return tuple(map(whole, () if isinstance(value, str) else _items(value)))


def place(value: Any) -> Path:
    """Read a path."""
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str) or "\0" in found:
        raise _OddError("a path")
    return Path(found)


def places(value: Any) -> tuple[Path, ...]:
    """Read one or more paths."""
    return (place(value),) if isinstance(value, str | os.PathLike) else tuple(map(place, _items(value)))


def _items(value: Any) -> list[Any]:
    if not isinstance(value, Iterable) or isinstance(value, bytes | bytearray | Mapping):
        raise _OddError("a list")
    return list(value)


def _called(value: Any) -> Any:
    if not callable(value):
        raise _OddError("something to call")
    return value


def _joined(value: Any) -> Any:
    if not (isinstance(getattr(value, "rank", None), int) and callable(getattr(value, "collect", None))):
        raise _OddError("what onnxgrail.join() gives")
    return value


_KINDS: dict[Kind, Reader] = {
    "amount": amount,
    "contents": _mapping(text, "output names with words"),
    "file": lambda value: str(place(value)),
    "flag": flag,
    "layers": layers,
    "names": names,
    "number": number,
    "numbers": several,
    "path": place,
    "paths": places,
    "pattern": pattern,
    "portion": portion,
    "share": portion,
    "report": places,
    "shapes": _mapping(wholes, "input names with lists of sizes"),
    "text": text,
    "whole": whole,
    "widths": _mapping(whole, "names with whole numbers"),
    "word": text,
    "words": words,
}
READERS: dict[str, Reader] = {
    **{name: _KINDS[row.value.kind] for name, row in OPTIONS.items() if row.value.kind in _KINDS},
    **dict.fromkeys(("rounds", "threads", "repeats"), whole),  # from here on of bench, demo and export alone
    "seconds": number,
    "out": place,
    "batch_sizes": wholes,
    "ratios": several,
    "models": names,
    "progress": _called,
    "group": _joined,
}


def read(name: str, value: Any, label: str = "") -> Any:
    """Return a value converted to the type of its keyword; None, and values of unknown keywords, unchanged.

    Args:
        name: of a keyword, or of a key of a recipe.
        value: the value to convert.
        label: source of the value, for the message.

    Raises:
        UsageError: it has the wrong type.
    """
    reader = READERS.get(name)
    return value if value is None or reader is None else read_as(reader, name, value, label)


def read_as(reader: Reader, name: str, value: Any, label: str = "") -> Any:
    """Return what a reader makes of a value.

    Args:
        reader: for one kind of values.
        name: of a keyword, or of a key of a recipe, for the message.
        value: what was given.
        label: where that stands, for the message.

    Raises:
        UsageError: it is of another kind.
    """
    try:
        return reader(value)
    except _OddError as expected:
        raise odd(name, value, label, str(expected)) from None


def check_gone(name: str, message: str) -> None:
    """Check that an option or a choice was not removed after an earlier version.

    Raises:
        UsageError: it was removed; the hint says what to use instead.
    """
    if name in GONE:
        raise UsageError(message, hint=GONE[name])


def odd(name: str, value: Any, label: str, expected: str) -> UsageError:
    """Return the error for a value of the wrong type."""
    short = reprlib.Repr()  # YAML aliases can expand a short text to an unlimited value
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    try:
        shown = short.repr(value)
    except ValueError:  # Python does not print numbers of thousands of digits
        shown = "too large a number"
    return UsageError(f"{f'{label}: ' if label else ''}{name} is {shown}, expected {expected}")


def within(name: str, value: Any) -> Any:
    """Return the value of an option if it is within its limits, or not a number.

    Raises:
        UsageError: it is a number beyond them.
    """
    row = OPTIONS.get(name)
    if row is None or isinstance(value, bool) or not isinstance(value, int | float) or row.value.allows(value):
        return value
    raise UsageError(f"{name} must be {row.value.limits}, got {value:.12g}")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public function so that its keywords are checked first; None stands for the default.

    Raises:
        UsageError: a keyword has the wrong type, or is a number beyond its limits.
        OnnxGrailError: a path cannot be looked up: its name is too long, or a folder may not be searched.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, value in list(bound.arguments.items()):
            parameter = signature.parameters[name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: read(key, inner) for key, inner in value.items()}
            elif value is None and name in READERS and "None" not in str(parameter.annotation):
                bound.arguments[name] = parameter.default
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = within(name, read(name, value))
        try:
            return function(*bound.args, **bound.kwargs)
        except OSError as error:
            if error.errno not in CLOSED or error.filename is None:
                raise
            raise OnnxGrailError(f"{str(error.filename)!r}: {error.strerror}") from error

    return call
