"""The options of commands, made from the table of options, and the checks that commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from onnxgrail.recipe.table import AMOUNTS, FILLED, OPTIONS
from onnxgrail.recipe.table.option import Kind, Option, Value, spelled

from . import values
from .plugged import Plugged

F = TypeVar("F", bound=Callable[..., Any])
REPEATED = ("names", "paths", "report")
PAIRS = ("contents", "shapes")


def _whole(value: Value) -> Any:
    low, high = (None if limit is None else int(limit) for limit in (value.least, value.most))
    return click.IntRange(low, high)


def _number(value: Value) -> Any:
    low = value.least if value.above is None else value.above
    high = value.most if value.below is None else value.below
    return click.FloatRange(low, high, min_open=value.above is not None, max_open=value.below is not None)


TYPES: Mapping[Kind, Callable[[Value], Any]] = {
    "contents": lambda value: values.content(value.words),
    "device": lambda _: values.device,
    "file": lambda _: click.Path(),
    "number": _number,
    "numbers": lambda _: values.floats,
    "path": lambda _: click.Path(path_type=Path),
    "paths": lambda _: click.Path(),
    "pattern": lambda _: values.regex,
    "report": lambda _: values.report_file,
    "shapes": lambda _: values.shape,
    "share": lambda _: values.ratio,
    "whole": _whole,
    "word": lambda value: Plugged(value.words, value.plugins) if value.plugins else click.Choice(value.words),
    "words": lambda value: values.words(value.words, value.empty),
}
"""The parsers of values; other kinds stay text."""


def options_of(command: str, **changes: Mapping[str, Any]) -> Callable[[F], F]:
    """Return a decorator with the options that the table lists for a command, in its order.

    Args:
        command: name of the command.
        changes: by name of an option, the attributes of its row that differ for this command.
    """
    rows = [replace(row, **changes.get(name, {})) for name, row in OPTIONS.items() if command in row.commands]

    def apply(function: F) -> F:
        for row in reversed(rows):
            function = _option(row)(function)
        return function

    return apply


def _option(row: Option) -> Callable[[F], F]:
    """Return the decorator for a row of the table."""
    names = [f"{word}/{row.off}" if row.off and word == row.spelled else word for word in row.spellings]
    otherwise = f"  [default: {row.otherwise}]" if row.otherwise else ""
    settings: dict[str, Any] = {"help": row.help + otherwise, "required": row.required}
    if row.value.kind == "flag":
        settings |= {"default": row.default} if row.off else {"is_flag": True}
    elif row.value.kind in REPEATED:
        settings["multiple"] = True
    elif row.value.kind in PAIRS:
        settings |= {"multiple": True, "callback": _mapping}
    else:
        many = isinstance(row.default, tuple)
        settings["default"] = (",".join(row.default) or row.value.empty) if many else row.default
    if row.value.kind in TYPES:
        settings["type"] = TYPES[row.value.kind](row.value)
    if row.name == "verbose":
        settings |= {"expose_value": False, "callback": _verbose}
    metavar = row.metavar or row.value.metavar or None
    shown = settings.get("default") is not None
    return click.option(*names, row.name, metavar=metavar, show_default=shown, **settings)


def _mapping(_ctx: click.Context, _param: click.Parameter, pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Return the names of a repeated option with their values; the last one of a name counts."""
    return dict(pairs)


def _verbose(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta["onnxgrail.verbose"] = value


def keeps(resume: Path | None) -> None:
    """Store the folder of --resume for the message of an interrupted run."""
    click.get_current_context().meta["onnxgrail.resume"] = resume


def chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that `--effort` decides, where nobody gave them."""
    source = click.get_current_context().get_parameter_source
    unasked = {name for name in FILLED if source(name) is ParameterSource.DEFAULT}
    return {name: value for name, value in settings.items() if name not in unasked}


def only_one(recipe: Mapping[str, Any]) -> None:
    """Check that at most one amount is given.

    Raises:
        click.UsageError: two of them are given.
    """
    given = [name for name in AMOUNTS if recipe.get(name) is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(map(spelled, given))} exclude each other: give one of them")


def one_output(out: Path | None, output: Path | None) -> Path | None:
    """Return the output path, given as argument or as option."""
    if out is not None and output is not None and out != output:
        raise click.UsageError("give the output once: as OUT or with --output")
    return out or output
