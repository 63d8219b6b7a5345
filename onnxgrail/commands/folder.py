"""Compress all models of an exported folder: `compress_folder`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

from onnxgrail.calibration.feeds.encoded import encoded
from onnxgrail.calibration.supply import given, reading_for, sampling_of
from onnxgrail.commands.compress import compress
from onnxgrail.errors import DataError, NothingToCompressError, OutputError, UsageError
from onnxgrail.graph.io.model_file import load
from onnxgrail.job.exported import Exported, exported_of
from onnxgrail.machine.files.paths import check_folder
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.choices import Choices, Options
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.result import FolderResult

READING = (
    "tokenizer",
    "sequence_length",
    "image_mean",
    "image_std",
    "image_form",
    "input_shapes",
)  # what ready feeds do not need
SINGLE = ("report", "resume", "save_recipe", "save_stats", "stats")


@checked
def compress_folder(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    data: Any = None,
    held_out: Any = None,
    **options: Unpack[Options],
) -> FolderResult:
    """Compress all models of a folder as Optimum, transformers.js or ONNX Runtime GenAI write it, for the same loaders.

    Configuration, tokenizer and vocabulary are copied. Text is read with the folder's tokenizer, images with the
    numbers of its processor. A decoder next to an encoder is calibrated with what the encoder makes of the data and
    with the tokens that it writes itself. A model that the data do not fit, or that has nothing to remove, is copied as
    it is.

    Args:
        folder: the exported folder.
        output: the folder to write; it defaults to `FOLDER.compressed`.
        data: calibration data, as for `compress`.
        held_out: samples that judge the result, as for `compress`.
        **options: all other keywords of `compress`; those that name one file (`report`, `resume`, `stats`,
            `save_stats`, `save_recipe`) need a folder with one model.

    Returns:
        FolderResult: the result of each model, and what was copied or left out.

    Raises:
        UsageError: an option suits one model only, or would change what the folder's configuration states.
        ModelError: the folder has no model.
        OutputError: the output exists and `force` is not given, or is the folder itself.
        OnnxGrailError: of `compress`, if no model could be compressed.
    """
    exported, dry = exported_of(Path(folder)), bool(options.get("dry_run"))
    target = Path(output) if output is not None else Path(f"{Path(folder).absolute()}.compressed")
    _check(exported, target, options)
    data, held_out = (list(one) if isinstance(one, Iterator) else one for one in (data, held_out))
    stated = {name: value for name, value in options.items() if value is not None}
    results, copied, first = {}, {}, None
    for graph in exported.graphs:
        settings = exported.settings(data, held_out) | stated
        try:
            found = None if dry else target / graph
            results[graph.as_posix()] = _compressed(exported, graph, found, data, held_out, settings)
        except (DataError, NothingToCompressError) as error:
            copied[graph] = str(error)
            first = first or error
    if first is not None and not results:
        raise first
    group = options.get("group")
    if not dry and (group is None or group.rank == 0):
        exported.copy(target, copied.keys())
    return FolderResult(
        output=None if dry else target,
        results=results,
        copied={graph.as_posix(): why for graph, why in copied.items()},
        left_out={file.as_posix(): why for file, why in exported.left_out(copied.keys()).items()},
    )


def _compressed(
    exported: Exported, graph: Path, output: Path | None, data: Any, held_out: Any, settings: dict[str, Any]
) -> Any:
    """Compress one model; if the data do not fit it, with what the encoder makes of them."""
    source, encoder = exported.root / graph, exported.encoder()
    try:
        return compress(source, output, data=data, held_out=held_out, **settings)
    except DataError:
        if data is None or encoder is None or encoder == source:
            raise
    recipe = recipe_of({name: value for name, value in settings.items() if name in Choices.__annotations__})
    batches = given(data, load(encoder), reading_for(recipe), sampling_of(recipe))
    feeds = encoded(encoder, source, batches, exported.start())
    rest = {name: value for name, value in settings.items() if name not in READING}
    return compress(source, output, data=feeds, held_out=held_out, **rest)


def _check(exported: Exported, target: Path, options: Options) -> None:
    """Check what can be checked before any work.

    Raises:
        UsageError, OutputError: see `compress_folder`.
    """
    alone = [name for name in SINGLE if options.get(name)]
    if alone and len(exported.graphs) > 1:
        option = f"--{alone[0].replace('_', '-')}"
        raise UsageError(f"{option} is for one model, and the folder has {len(exported.graphs)}", hint="Leave it out")
    if options.get("kv_io"):
        raise UsageError(
            "--kv-io would change the cache sizes that the folder's configuration states", hint="Leave it out"
        )
    real, root = target.resolve(), exported.root.resolve()
    if real.is_relative_to(root) or root.is_relative_to(real):
        raise OutputError(f"output {str(target)!r} contains the input or lies in it", hint="Choose another folder")
    if target.exists() and not target.is_dir():
        raise OutputError(f"output {str(target)!r} is a file", hint="Give a folder")
    if target.is_dir() and any(target.iterdir()) and not options.get("force"):
        raise OutputError(f"output {str(target)!r} exists", hint="Use --force to replace its files")
    check_folder(target)
