"""The class of commands: `--help` shows the options that most people need, and no pattern or data get lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import click

from onnxgrail.recipe.table import GROUPS, OPTIONS

OTHER, MACHINE = "Options", "Machine"
JOINS = {"pattern": "|", "words": ","}  # what stands between several values of an option, by kind
ONCE = ("data",)  # further options of which no value may get lost; of others, the last one counts


def group_of(parameter: click.Parameter) -> str:
    """Return the heading of an option; those that the table does not list are options of one command."""
    row = OPTIONS.get(str(parameter.name))
    if row is not None:
        return row.group
    return MACHINE if parameter.name == "help_all" or "--help" in parameter.opts else OTHER


class Grouped(click.Command):
    """A command whose options are listed in groups.

    Attributes:
        common: names of the parameters that `--help` shows; None shows all of them, and there is no `--help-all`.
        headings: by name of a parameter, its heading if that is not the one in the table.
    """

    def __init__(
        self,
        *args: Any,
        common: Collection[str] | None = None,
        headings: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self.common, self.headings = common, headings
        super().__init__(*args, **settings)
        if common is not None:
            self.params.append(_help_all_option())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of a command.

        Raises:
            click.UsageError: an option is given twice of which both values are meant; click would take the last one.
        """
        _check_once([p for p in self.params if isinstance(p, click.Option)], args, ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, with a section per group."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
        shown = options if self.common is None or ctx.meta.get(_ALL) else self._first(options)
        for group in (OTHER, *GROUPS):
            inside = [p for p in shown if self.headings.get(str(p.name), group_of(p)) == group]
            rows = [record for p in inside if (record := p.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)
        left = len(options) - len(shown)
        if left:
            formatter.write_paragraph()
            formatter.write_text(f"{left} more options: {ctx.command_path} --help-all")

    def _first(self, options: Iterable[click.Option]) -> list[click.Option]:
        wanted = {*(self.common or ()), "help_all"}
        return [option for option in options if option.name in wanted or "--help" in option.opts]


def _check_once(options: Iterable[click.Option], args: Iterable[str], ctx: click.Context) -> None:
    single = {word: one.name for one in options if one.name in ONCE or _sign(one.name) for word in one.opts}
    seen, words = set[str | None](), iter(args)
    for word in words:
        if word == "--":
            return
        name, given, _ = word.partition("=") if word.startswith("--") else (word, "", "")
        if name not in single:
            continue
        if not given:
            next(words, None)  # its value
        if single[name] in seen:
            sign = _sign(single[name])
            advice = f"join the values: {name} {f'A{sign}B'!r}" if sign else "give it once"
            raise click.UsageError(f"{name} is given twice: {advice}", ctx)
        seen.add(single[name])


def _sign(name: str | None) -> str:
    """Return what stands between several values of an option; empty if it has one."""
    return JOINS.get(OPTIONS[name].value.kind, "") if name in OPTIONS else ""


_ALL = "onnxgrail.help_all"


def _help_all_option() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options and exit.",
    )
