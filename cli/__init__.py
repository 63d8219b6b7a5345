"""The command line: each command parses options, makes one library call and prints one thing.

Nothing but click is imported until a command runs, so that `--help` is instant.
"""

from __future__ import annotations

import errno
import logging
import traceback
import warnings
from typing import Any

import click

from .apply import apply
from .bench import bench
from .compare import compare
from .compress import compress
from .demo import demo
from .export import export
from .inspect import inspect
from .parts import render
from .parts.streams import settle as settle
from .refine import refine

EXIT_USAGE, EXIT_NOTHING = 2, 4
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class _Commands(click.Group):
    """A group that turns everything a command raises into one line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        # What onnx-ir notes about odd files comes back as an error or as a refusal; one line is enough.
        logging.getLogger("onnx_ir").addHandler(logging.NullHandler())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # numbers that are not finite end in the report
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            message, code = _interrupted(ctx.meta), 1
        except MemoryError:
            message, code = "out of memory; try a smaller --batch-size or fewer --samples", 1
        except Exception as error:  # the border: no traceback unless asked for
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of stdout went away; click ends quietly
            if ctx.meta.get("onnxgrail.verbose"):
                click.echo(traceback.format_exc(), err=True)
            if (ctx.obj or {}).get("interrupted", bool)():  # and turned into an error by what it met
                message, code = _interrupted(ctx.meta), 1
            else:
                message, code = _explain(error)
        render.say(f"Error: {message}", err=True)
        raise click.exceptions.Exit(code)


def _interrupted(meta: dict[str, Any]) -> str:
    """How to go on, where that is possible."""
    if "onnxgrail.job.resume" not in meta:
        return "interrupted"
    folder = meta["onnxgrail.job.resume"]
    if folder is None:
        return "interrupted. With --resume DIR the same command would go on where it was"
    return f"interrupted. The same command goes on from {str(folder)!r}"


def _explain(error: Exception) -> tuple[str, int]:
    """One line and the exit code."""
    from onnxgrail import NothingToCompressError, OnnxGrailError, UsageError

    if isinstance(error, NothingToCompressError):
        return str(error), EXIT_NOTHING
    if isinstance(error, OnnxGrailError):
        return str(error), EXIT_USAGE if isinstance(error, UsageError) else 1
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        nameless = error.errno in FULL and not error.filename
        return f"{text}. Set TMPDIR to a folder with room for temporary files" if nameless else text, 1
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"internal error: {text}; please report it with the output of --verbose", 1


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import onnxgrail

        click.echo(f"onnxgrail {onnxgrail.__version__}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
def main() -> None:
    """Make ONNX models smaller without training.

    Exit codes: 0 done and gates passed, 1 runtime error, 2 usage, 3 a gate failed (the file is still written),
    4 nothing could be compressed.
    """


main.add_command(compress)
main.add_command(inspect)
main.add_command(refine)
main.add_command(compare)
main.add_command(bench)
main.add_command(apply)
main.add_command(export)
main.add_command(demo)
