"""Options that commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from . import values

F = TypeVar("F", bound=Callable[..., Any])


def chain(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Combine several options into one decorator; `--help` lists them in this order."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def _verbose(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta["onnxgrail.verbose"] = value


FORCE = "Replace existing files; input files are never replaced."

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
verbose_option = click.option(
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_verbose,
    help="Print more details, and tracebacks of errors.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors (and JSON with --json).")
progress_option = click.option("--no-progress", is_flag=True, help="Do not show progress.")
talk_options = chain(json_option, quiet_option, verbose_option, progress_option)


def external_option(default: str) -> Callable[[F], F]:
    """Return the option that says where weights are stored."""
    return click.option(
        "--save-as-external-data/--no-save-as-external-data",
        default=None,
        help="Store weights in a separate file, or in the model file; over 2 GB always in a separate file.  "
        f"[default: {default}]",
    )


min_cosine_option = click.option(
    "--min-cosine",
    type=click.FloatRange(-1, 1),
    metavar="C",
    help="Exit 3 if the mean cosine of an output is lower; the file is still written.",
)
report_option = click.option(
    "--report",
    "reports",
    type=values.report_file,
    metavar="FILE",
    multiple=True,
    help="Write the report as JSON (.json) or as a page (.html); repeatable.",
)
latency_option = click.option(
    "--latency/--no-latency",
    default=None,
    help="Measure latency of the original and the result, in turn, for the report.  [default: if a page is written]",
)
curves_option = click.option(
    "--curves/--no-curves",
    default=None,
    help="Measure the error of every block alone at several widths, for the report; takes as long as calibrating, or "
    "twice as long.  [default: if a page of a small model is written]",
)
shapes_option = click.option(
    "--input-shapes",
    type=values.shape,
    metavar="NAME:SHAPE",
    multiple=True,
    help="Shape of a random input: x:1,3,224,224, x:1x3x224x224 or x:[1,3,224,224]; repeatable.",
)

kv_io_option = click.option(
    "--kv-io",
    is_flag=True,
    help="Also narrow key-value caches and states (of recurrent layers, of streamed convolutions) that are inputs and "
    "outputs of the model; callers must then pass narrower ones.",
)

listed_option = click.option(
    "--keep-initializer-inputs",
    is_flag=True,
    help="Keep weights that are also graph inputs as inputs; ONNX Runtime cannot fold or fuse such weights.",
)

data_options = chain(
    click.option(
        "--data",
        "--calib",
        "data",
        metavar="PATH",
        help=f"Calibration data: {values.DATA}.  [default: random inputs]",
    ),
    click.option(
        "--samples", type=click.IntRange(min=1), metavar="N", help="Number of samples to use, spread over the data."
    ),
    click.option(
        "--batch-size", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="Samples per run."
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        show_default=True,
        help="Seed of all random numbers.",
    ),
    shapes_option,
)

held_out_option = click.option(
    "--held-out",
    metavar="N|PATH",
    help="Samples that are excluded from all fits and judge the result, also for --min-cosine: N samples of the data, "
    "separate data, or 0 for none.  [default: a fifth of the data, 8 to 256 samples, if there are 32 or more]",
)

tokenizer_option = click.option(
    "--tokenizer", type=click.Path(), metavar="FILE", help="For text: the tokenizer.json of the model."
)

reading_options = chain(
    tokenizer_option,
    click.option(
        "--sequence-length",
        type=click.IntRange(min=1),
        metavar="N",
        help="For text: maximum number of tokens per sample.  [default: 128, if the model leaves it open]",
    ),
    click.option(
        "--image-mean",
        type=values.floats,
        metavar="M[,M,M]",
        help="For images: mean to subtract from pixels in 0..1, one for all channels or one per channel.  [default: 0]",
    ),
    click.option(
        "--image-std", type=values.floats, metavar="S[,S,S]", help="For images: divisor after that.  [default: 1]"
    ),
)


budget_options = chain(
    click.option("--target-params", metavar="N", help="Instead of a ratio: maximum number of parameters: 60%, 500M."),
    click.option("--target-macs", metavar="N", help="Maximum number of multiply-accumulates per sample: 60%, 1.2G."),
    click.option("--target-size", metavar="N", help="Maximum size of the file: 60%, 25MB."),
    click.option("--target-latency", metavar="T", help="Maximum time of one run, measured on this machine: 60%, 8ms."),
    click.option(
        "--allocate",
        type=click.Choice(values.ALLOCATIONS),
        default="uniform",
        show_default=True,
        help="Distribution of the narrowing over blocks: equal, more with depth, by standardized scores, or by "
        "measured effect on the outputs (used only if it is better than uniform).",
    ),
)

method_options = chain(
    click.option(
        "--method",
        type=values.methods,
        metavar="METHODS",
        default="grail",
        show_default=True,
        help="Narrow blocks (grail), replace redundant layers by low rank (grasp), or both: grail,grasp; ic adds input "
        "compensation to either.",
    ),
    click.option(
        "--grasp-layers",
        metavar="LAYERS",
        help="Number of layers that grasp replaces, the most redundant first; or a comma-separated list of names of "
        "layers, blocks, nodes or weights; or all, filtered by --include.  [default: as many as --ratio requires]",
    ),
    click.option(
        "--grasp-retain",
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        metavar="R",
        default=0.1,
        show_default=True,
        help="Share of the parameters of a replaced matrix to keep.",
    ),
    click.option(
        "--grasp-rank",
        type=click.Choice(values.GRASP_RANKS),
        default="attribution",
        show_default=True,
        help="Criterion for the singular values to keep: effect on the loss with the gradient at half their value "
        "(attribution) or at the full weights, as published (taylor), both with torch; or size (magnitude).",
    ),
    click.option(
        "--grasp-whiten/--no-grasp-whiten",
        default=False,
        show_default=True,
        help="Decompose the matrix weighted by the second moments of its inputs, instead of the matrix alone.",
    ),
    click.option(
        "--grasp-refit/--no-grasp-refit",
        default=False,
        show_default=True,
        help="Fit the output factor of each low-rank pair to the calibration data by least squares.",
    ),
)

REFINE_HELP = (
    "all weights block by block (laco; in small steps on few samples: regional), or as a whole (distill); "
    "normalizations alone (norms); additions to the input (ic)."
)

ic_option = click.option(
    "--ic-rank",
    type=click.IntRange(min=1),
    metavar="R",
    help="Number of additions from which ic chooses.  [default: as many as 3 % of the parameters allow, at most 32]",
)

seconds_option = click.option(
    "--budget-seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Time limit of --refine.  [default: none]",
)

refine_options = chain(
    click.option(
        "--refine",
        type=values.refines,
        metavar="KINDS",
        default="none",
        show_default=True,
        help="Then fit to the original by gradient (needs torch), in this order: " + REFINE_HELP,
    ),
    ic_option,
    seconds_option,
)

stats_options = chain(
    click.option(
        "--save-stats",
        type=click.Path(path_type=Path),
        metavar="FILE.npz",
        help="Store the statistics of the original model in a file.",
    ),
    click.option(
        "--stats",
        type=click.Path(path_type=Path),
        metavar="FILE.npz",
        help="Use stored statistics: another ratio, selector or budget then needs no new pass over the original.",
    ),
)

resume_option = click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Store finished steps in this folder; repeating the command of a killed run continues it.",
)

cache_option = click.option(
    "--cache-budget",
    metavar="SIZE",
    default="1G",
    show_default=True,
    help="Memory for activations kept between blocks; the rest goes to temporary files.",
)


def keeps(resume: Path | None) -> None:
    """Store the folder of --resume for the message of an interrupted run."""
    click.get_current_context().meta["onnxgrail.resume"] = resume


def only_one(ctx: click.Context, recipe: dict[str, Any]) -> None:
    """Check that at most one of the ratios and targets is given; the default of `--ratio` gives way to the others.

    Raises:
        click.UsageError: two of them are given.
    """
    given = [f"--target-{name}" for name in values.TARGETS if recipe.get(f"target_{name}") is not None]
    if recipe.get("unit_ratio") is not None:
        given.insert(0, "--unit-ratio")
    default = ctx.get_parameter_source("ratio") == click.core.ParameterSource.DEFAULT
    if not default or ctx.get_parameter_source("sparsity") == click.core.ParameterSource.COMMANDLINE:
        given.insert(0, "--ratio")
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other: give one of them")
    if given and given[0] != "--ratio":
        del recipe["ratio"]


def one_output(target: Path | None, output: Path | None) -> Path | None:
    """Return the output path, given as argument or as option."""
    if target is not None and output is not None and target != output:
        raise click.UsageError("give the output once: as OUT or with --output")
    return target or output
