"""The command line: each command parses options, makes one library call and prints the result.

Only click is imported until a command runs, so that `--help` is fast.
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
from .frontier import frontier
from .inspect import inspect
from .parts import render
from .refine import refine
from .report import report

EXIT_USAGE, EXIT_NOTHING = 2, 4
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class _Commands(click.Group):
    """A group that turns every exception of a command into a line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        # onnx-ir logs problems of files, which are also raised as errors or reported as refusals.
        logging.getLogger("onnx_ir").addHandler(logging.NullHandler())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # non-finite numbers are reported anyway
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            message, code = _interrupted(ctx.meta), 1
        except MemoryError:
            message, code = "out of memory; try a smaller --batch-size or fewer --samples", 1
        except Exception as error:  # the boundary: no traceback without --verbose
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of stdout has closed it; click ends quietly
            if ctx.meta.get("onnxgrail.verbose"):
                click.echo(traceback.format_exc(), err=True)
            if (ctx.obj or {}).get("interrupted", bool)():  # a library turned the interrupt into another error
                message, code = _interrupted(ctx.meta), 1
            else:
                message, code = _explain(error)
        render.say(f"Error: {message}", err=True)
        raise click.exceptions.Exit(code)


def _interrupted(meta: dict[str, Any]) -> str:
    """Return the message of an interrupted run, with the way to continue it if there is one."""
    if "onnxgrail.resume" not in meta:
        return "interrupted"
    folder = meta["onnxgrail.resume"]
    if folder is None:
        return "interrupted. With --resume DIR the same command would go on where it was"
    return f"interrupted. The same command continues from {str(folder)!r}"


def _explain(error: Exception) -> tuple[str, int]:
    """Return the message of an error in one line, and the exit code."""
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
main.add_command(frontier)
main.add_command(inspect)
main.add_command(refine)
main.add_command(compare)
main.add_command(bench)
main.add_command(report)
main.add_command(apply)
main.add_command(export)
main.add_command(demo)
