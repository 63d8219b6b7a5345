"""Measure the latency of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source, fixed_batch
from onnxgrail.calibration.feeds.kinds.feeds import again
from onnxgrail.calibration.feeds.reading import Numbers, Sampling, reading_of
from onnxgrail.calibration.feeds.signature import Signature, signature_of
from onnxgrail.calibration.matched import common_batch, loaded, runnable
from onnxgrail.calibration.runtime.custom import Libraries
from onnxgrail.calibration.runtime.custom import custom_ops as registered
from onnxgrail.calibration.runtime.session import CPU, Setup, open_session
from onnxgrail.calibration.runtime.threads import count, pinned
from onnxgrail.calibration.runtime.timing import FEWEST, Times, machine, summarise, take_turns
from onnxgrail.calibration.supply import given
from onnxgrail.core import Array, Feed
from onnxgrail.errors import UsageError
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.machine.plain import Plain
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.comparison import weigh
from onnxgrail.report.environment import calibration_entry, environment

LEAST, MOST = 9, 10_000  # limits on the rounds if `seconds` is given
MOST_ROUNDS, MOST_THREADS = 1_000_000, 4096
TAIL = 100  # rounds from which the 99th percentile is below the slowest run
SHOWN = 4  # inputs whose shapes a note names


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The latency of one model at one batch size.

    Attributes:
        path: of the model; bytes: of its files; batch_size: samples per run; rounds: number of runs.
        times: milliseconds per run and their statistics.
        throughput: samples per second at the median.
    """

    path: str
    bytes: int
    batch_size: int
    rounds: int
    times: Times
    throughput: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark(Plain):
    """The latencies of all models at all batch sizes, with date, machine and environment."""

    rows: tuple[Timing, ...]
    threads: int
    notes: tuple[str, ...]
    calibration: Mapping[str, Any]
    date: str
    machine: str
    environment: Mapping[str, Any]

    def to_data(self) -> dict[str, Any]:
        """Return plain data; `hidden` is True if noise hides the difference to the first model."""
        data = Plain.to_data(self)
        for entry, row in zip(data["rows"], self.rows, strict=True):
            times = entry.pop("times")
            entry |= {("ratio_interval" if key == "interval" else key): value for key, value in times.items()}
            entry["hidden"] = row.times.hidden
        return data


@checked
@pinned()
def bench(
    *models: Any,
    data: Source | None = None,
    batch_sizes: Sequence[int] = (1,),
    seconds: float = 3.0,
    rounds: int | None = None,
    threads: int | None = None,
    seed: int = 0,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    tokenizer: str | Path | None = None,
    sequence_length: int | None = None,
    image_mean: Numbers = None,
    image_std: Numbers = None,
    image_form: Sequence[str] | None = None,
    providers: Sequence[str] = CPU,
    custom_ops: Libraries = (),
    progress: Progress = silent,
) -> Benchmark:
    """Time models on the same feed, in turn.

    Args:
        *models: paths or objects, as for `compress`; ratios are relative to the first.
        data: as for `compress`; None uses random inputs, which give the same times unless the work depends on values.
        batch_sizes: samples per run, measured one after another; a model with a fixed batch size is run at that size.
        seconds: time for all models together, per batch size.
        rounds: number of runs of each model, instead of `seconds`.
        threads: inside one operator; None for all that the process may use.
        seed: of random inputs.
        input_shapes: shapes of random inputs.
        tokenizer: a tokenizers JSON file, for text.
        sequence_length: maximum number of tokens per sample, for text.
        image_mean: subtracted from the pixels of images, in 0..1, one number or one per channel.
        image_std: divisor of the pixels after that.
        image_form: `bgr`, and `pad` or `stretch` instead of cropping images.
        providers: ONNX Runtime execution providers.
        custom_ops: as for `compress`.
        progress: called per batch size.

    Returns:
        Benchmark: `rows`, one per model and batch size, each with `path`, `bytes`, `batch_size`, `rounds`, `throughput`
            (samples per second at the median) and `times`: `median`, `mean`, `p90`, `p99` and `spread` in milliseconds,
            and the `ratio` of speeds to the first model with its 95 % `interval`.

    Raises:
        UsageError: no model, or a number below 1.
        ModelError: a model cannot be read or run, or its inputs differ from those of the first.
        DataError: the data do not fit.
    """
    _check(models, batch_sizes, seconds, rounds, threads)
    paths, graphs = loaded(models)
    signature = signature_of(graphs[0])
    reading = reading_of(
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        image_mean=image_mean,
        image_std=image_std,
        image_form=image_form,
        input_shapes=input_shapes,
    )
    data = again(data, None)
    fixed = common_batch(graphs)
    if data is not None and fixed_batch(signature) is not None:
        fixed = None  # given data have the size that the first model takes
    sizes = (fixed,) if fixed else tuple(dict.fromkeys(batch_sizes))
    notes = [f"the model takes batches of {fixed} only"] if fixed and set(sizes) != set(batch_sizes) else []
    threads = threads or count()
    rows: list[Timing] = []
    shapes: list[str] = []
    batches: Batches | None = None
    with registered(custom_ops), ExitStack() as stack:
        sources = [runnable(model, path) for model, path in zip(graphs, paths, strict=True)]
        setup = Setup(providers=providers, threads=threads, timed=True)
        sessions = [stack.enter_context(open_session(source, setup)) for source in sources]
        for number, size in enumerate(sizes):
            progress("bench", number, len(sizes))
            drawn = size if data is None else None
            batches = given(data, graphs[0], reading, Sampling(samples=drawn, batch_size=size, seed=seed))
            feed, samples = _filled(batches.first(), signature, size)
            asked = input_shapes is None or tuple(batch_sizes) != (1,)
            if samples != size and asked:  # data or --input-shapes fix the number of samples
                notes.append(f"batches of {size} were asked for, the inputs hold {samples}")
            if any(row.batch_size == samples for row in rows):
                continue
            shapes.append(f"inputs: {_shapes(feed)}")
            feeds = [fit(feed, between(graphs[0], model)) for model in graphs]
            least, most = (LEAST, MOST) if rounds is None else (rounds, rounds)
            with batches.advising():
                times = take_turns(sessions, feeds, least=least, most=most, seconds=seconds)
            rows += _rows(paths, graphs, times, samples)
        progress("bench", len(sizes), len(sizes))
    assert batches is not None
    return Benchmark(
        rows=tuple(rows),
        threads=threads,
        notes=(*notes, *shapes, *_doubts(rows)),
        # Notes on random inputs are about fidelity, which is not measured here.
        calibration=calibration_entry(batches) | ({"notes": []} if batches.synthetic else {}),
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        environment={"onnxgrail": metadata.version("onnxgrail"), **environment(providers=providers, threads=threads)},
    )


def _shapes(feed: Mapping[str, Array]) -> str:
    """Return the shapes of the first inputs, such as x 1x3x224x224."""
    shown = [f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in [*feed.items()][:SHOWN]]
    return ", ".join([*shown, *(["..."] if len(feed) > SHOWN else [])])


def _rows(paths: Sequence[Path | None], models: Sequence[ir.Model], times: Array, samples: int) -> list[Timing]:
    """Return a row per model, from milliseconds (models, rounds) of runs on `samples` samples."""
    weights = [weigh(m, path, f"model {number}") for number, (m, path) in enumerate(zip(models, paths, strict=True), 1)]
    return [
        Timing(
            path=weight.path,
            bytes=weight.bytes,
            batch_size=samples,
            rounds=times.shape[1],
            times=found,
            throughput=samples / found.median * 1e3,
        )
        for weight, found in zip(weights, summarise(times), strict=True)
    ]


def _check(
    models: Sequence[Any], batch_sizes: Sequence[int], seconds: float, rounds: int | None, threads: int | None
) -> None:
    if not models:
        raise UsageError("no model to time", hint="Give at least one file")
    if not batch_sizes or min(batch_sizes) < 1:
        raise UsageError("batch sizes must be at least 1")
    if not seconds > 0:
        raise UsageError(f"seconds must be above 0, got {seconds:g}")
    for name, value, most in (("rounds", rounds, MOST_ROUNDS), ("threads", threads, MOST_THREADS)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name} must be at least 1 and at most {most}, got {value}")


def _filled(feed: Feed, signature: Signature, size: int) -> tuple[dict[str, Array], int]:
    """Return a feed of `size` samples, repeated if the data have too few, and its number of samples."""
    arrays = {entry.name: feed[entry.name] for entry in signature if entry.name in feed}
    lengths = {a.shape[0] if a.ndim else -1 for a in arrays.values()}
    if len(lengths) != 1 or lengths == {-1}:
        return arrays, 1
    have = lengths.pop()
    open_axis = all(entry.shape and not isinstance(entry.shape[0], int) for entry in signature)
    if have >= size or not open_axis:
        return arrays, have
    return {name: np.ascontiguousarray(a[np.arange(size) % have]) for name, a in arrays.items()}, size


def _doubts(rows: Sequence[Timing]) -> Iterator[str]:
    """Yield notes on the limits of the measurement."""
    for row in rows:
        if row.times.hidden and row.times.interval is not None:
            low, high = row.times.interval
            yield (
                f"noise hides the difference between {row.path} and the first model at batch {row.batch_size}: "
                f"ratio {low:.3f} to {high:.3f}; try more --seconds"
            )
    if any(row.rounds < FEWEST and row.times.ratio is not None for row in rows):
        yield f"fewer than {FEWEST} rounds say nothing about noise, so ratios have no interval"
    if rows and min(row.rounds for row in rows) < TAIL:
        yield f"p99 of fewer than {TAIL} runs is little more than the slowest of them"
