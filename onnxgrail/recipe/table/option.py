"""The row of the table of options, and the types of values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

Kind = Literal[
    "any",
    "amount",
    "contents",
    "device",
    "file",
    "flag",
    "layers",
    "names",
    "number",
    "numbers",
    "path",
    "paths",
    "pattern",
    "portion",
    "report",
    "share",
    "shapes",
    "text",
    "whole",
    "widths",
    "word",
    "words",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A type of values.

    Attributes:
        kind: says how text is read; `recipe/keywords.py` and `cli/parts/options.py` have a reader per kind.
        metavar: stands for the value in help.
        least, above, most, below: limits of a number.
        words: the allowed words; empty if every text is allowed.
        empty: word for none of the words; if it is empty, at least one word is required.
        plugins: group of the entry points whose names are also allowed.
    """

    kind: Kind
    metavar: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    words: tuple[str, ...] = ()
    empty: str = ""
    plugins: str = ""

    def allows(self, number: float) -> bool:
        """Return True if a number is within the limits; NaN never is, unless there are none."""
        return (
            (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    @property
    def limits(self) -> str:
        """Return the limits in words."""
        pairs = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {limit:g}" for word, limit in pairs if limit is not None)


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: its keyword in Python, which for fields of `Recipe` is also the key in recipe files.
        value: type of the value.
        help: one or two sentences for the command line and its reference.
        metavar: stands for the value in help, instead of that of `value`.
        spelling: on the command line, if it is not made of the name.
        also: other spellings on the command line.
        off: spelling that turns a flag off.
        otherwise: what happens without the option, if the default does not say it.
        commands: that have it; empty for an option of Python alone.
        required: the command does not run without it.
        group: heading in help; the table fills it in.
        default: of the recipe; the table fills it in.
    """

    name: str
    value: Value
    help: str
    _: KW_ONLY
    metavar: str = ""
    spelling: str = ""
    also: tuple[str, ...] = ()
    off: str = ""
    otherwise: str = ""
    commands: tuple[str, ...] = ("compress",)
    required: bool = False
    group: str = ""
    default: Any = None

    @property
    def spelled(self) -> str:
        """Return the spelling on the command line."""
        return self.spelling or spelled(self.name)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all spellings that set it, the short ones first."""
        return tuple(sorted((self.spelled, *self.also), key=lambda word: word.startswith("--")))


def spelled(name: str) -> str:
    """Return the usual spelling of a keyword on the command line."""
    return "--" + name.replace("_", "-")


def one_of(*words: str, plugins: str = "") -> Value:
    """Return the type of one word."""
    return Value(kind="word", words=words, plugins=plugins)


def some_of(words: tuple[str, ...], metavar: str, empty: str = "") -> Value:
    """Return the type of several words."""
    return Value(kind="words", words=words, metavar=metavar, empty=empty)


FLAG = Value(kind="flag")
COUNT = Value(kind="whole", metavar="N", least=1)
SHARE = Value(kind="share", metavar="R", least=0, below=1)
AMOUNT = Value(kind="amount", metavar="N")
NAME = Value(kind="text", metavar="NAME")
PATTERN = Value(kind="pattern", metavar="REGEX")
NUMBERS = Value(kind="numbers")
PATH = Value(kind="path", metavar="PATH")
ANY = Value(kind="any", metavar="PATH")
