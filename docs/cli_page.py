"""Write `docs/cli.md` from the commands themselves: `python docs/cli_page.py`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from onnxgrail.cli import main

HEAD = """# Command line

This page lists every command with all its options. `onnxgrail COMMAND --help` prints the same. The page of
[options](options.md) lists them by purpose. This page is generated from the commands by `docs/cli_page.py`.

Results go to stdout; warnings, errors and progress go to stderr. `--json` prints one JSON document instead of tables.
"""
CODES = "Exit codes:"
DEFAULT = re.compile(r"\s*\[default: ([^\]]*)\]")


def page() -> str:
    """Return the whole page: one section per command, in the order in which they were added."""
    about, _, codes = " ".join(str(main.help).split()).partition(CODES)
    head = f"{HEAD}\n`onnxgrail`: {about.strip()}\n\nExit codes: {codes.strip()}\n"
    return head + "".join(section(name, command) for name, command in main.commands.items() if not command.hidden)


def section(name: str, command: click.Command) -> str:
    """Return usage, purpose and options of one command."""
    context = click.Context(command, info_name=f"onnxgrail {name}", terminal_width=110)
    usage = " ".join(command.collect_usage_pieces(context))
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", str(command.help).strip())]
    rows = [row for parameter in command.params if (row := line(parameter))]
    return (
        f"\n## {name}\n\n```text\nonnxgrail {name} {usage}\n```\n\n"
        + "\n\n".join(escaped(text) for text in paragraphs)
        + "\n\n| option | default | meaning |\n| --- | --- | --- |\n"
        + "".join(rows)
    )


def line(parameter: click.Parameter) -> str:
    """Return one row of the table, or an empty string for arguments and hidden options."""
    if not isinstance(parameter, click.Option) or parameter.hidden:
        return ""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    words = parameter.help or ""
    said = DEFAULT.search(words)
    text = escaped(DEFAULT.sub("", words)) + (" Required." if parameter.required else "")
    return f"| {names}{value(parameter)} | {default(parameter, said)} | {text} |\n"


def value(parameter: click.Option) -> str:
    """Return the value that follows the name of an option."""
    if parameter.is_flag:
        return ""
    if isinstance(parameter.type, click.Choice):
        return " " + ", ".join(f"`{choice}`" for choice in parameter.type.choices)
    return f" `{parameter.metavar or parameter.type.name.upper()}`".replace("|", ", ")


def default(parameter: click.Option, said: re.Match[str] | None) -> str:
    """Return the default of an option, or an empty string if it says nothing."""
    if said is not None:
        return escaped(said[1])
    if not parameter.show_default:
        return ""
    if parameter.is_flag:
        return f"`{parameter.opts[0] if parameter.default else parameter.secondary_opts[0]}`"
    many = parameter.default if isinstance(parameter.default, tuple) else (parameter.default,)
    return " and ".join(f"`{one}`" for one in many)


def escaped(text: str) -> str:
    """Escape text for Markdown, and format options as code."""
    text = text.replace("|", " or ").replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(page(), encoding="utf-8")
