"""Compress and measure the embedded models on their real data, without downloads.

The module is not called `demo`: importing a submodule of that name would hide the function `onnxgrail.demo`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail import __version__
from onnxgrail.calibration.runtime.session import CPU, Session, Setup, open_session
from onnxgrail.calibration.runtime.timing import machine, summarise, take_turns
from onnxgrail.core import Floats
from onnxgrail.errors import UsageError
from onnxgrail.fidelity import intervals
from onnxgrail.machine.files.paths import check_output, make_folder
from onnxgrail.machine.files.temporary import scratch
from onnxgrail.machine.plain import Plain
from onnxgrail.machine.progress import Progress, silent, ticking
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.environment import environment

COMPENSATE = ("none", "grail", "best")
WARM_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The measurements of one model.

    Attributes:
        model: name of the embedded model.
        ratio: requested share to remove of the parameters in blocks that can be narrowed, 0 for the dense model.
        compensate: `none`, `grail` or `best`; empty for the dense model.
        metric: the meaning of `score`: accuracy (high is good) or perplexity (low is good).
        params, macs, bytes: size; macs per sample.
        score_interval: 95 % confidence interval of `score`, from the held-out samples.
        latency_ms: median time of one run, in milliseconds; spread_ms is the distance of its quartiles.
        speedup, speedup_interval: speedup over the dense model, and its 95 % confidence interval; None for the dense
            model.
        file: path of the compressed model, None if it was not kept.
    """

    model: str
    ratio: float
    compensate: str
    metric: str
    score: float
    params: int
    macs: int | None
    bytes: int
    latency_ms: float
    spread_ms: float
    file: str | None
    score_interval: tuple[float, float] | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo(Plain):
    """The measurements of all models, per model the dense one first, with date, machine and environment.

    Latency is that of a batch of `batch_size` on `threads` threads, the median of `repeats` interleaved runs.
    """

    rows: tuple[Row, ...]
    threads: int
    batch_size: int
    repeats: int
    date: str
    machine: str
    environment: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Variant:
    ratio: float
    compensate: str
    path: Path
    params: int
    macs: int | None


@checked
def demo(
    *,
    models: Sequence[str] | None = None,
    ratios: Sequence[float] = (0.3, 0.5),
    out: str | Path | None = None,
    force: bool = False,
    batch_size: int = 8,
    repeats: int = 30,
    threads: int = 1,
    seed: int = 0,
    progress: Progress = silent,
) -> Demo:
    """Compress the embedded models at each ratio, without and with compensation, and measure all of them.

    Args:
        models: names of embedded models; None takes all.
        ratios: shares to remove of the parameters in blocks that can be narrowed, each above 0 and below 1.
        out: folder for the compressed models and their reports; None keeps no files.
        force: replace existing files in that folder.
        batch_size: samples per run when latency is measured.
        repeats: number of timed runs of each model, in turn with the others.
        threads: threads of ONNX Runtime when latency is measured.
        seed: of all random numbers.
        progress: called per compressed model.

    Returns:
        Demo: `rows`, one per model, ratio and compensation, each with `metric` and `score` on held-out data, `params`,
            `macs`, `bytes`, `latency_ms` and `speedup` over the dense model, and 95 % intervals of score and speedup.

    Raises:
        UsageError: an unknown model or an impossible ratio.
        OutputError: a file in `out` exists and `force` is not given, or cannot be written.
        MissingExtraError: the embedded models are not installed.
    """
    from onnxgrail import models as embedded_models

    names = tuple(models) if models is not None else tuple(embedded_models.names())
    wrong = [ratio for ratio in ratios if not 0 < ratio < 1]
    if wrong:
        raise UsageError(f"ratio {wrong[0]} is impossible", hint="Choose numbers above 0 and below 1")
    subjects = [embedded_models.load(name) for name in names]
    rows: list[Row] = []
    total = len(names) * (len(ratios) * len(COMPENSATE) + 1)  # every variant, then the measurement
    tick = ticking(progress, "demo", total)
    progress("demo", 0, total)
    with _folder(None if out is None else Path(out)) as folder:
        for target in (_target(folder, name, *kind) for name in names for kind in product(ratios, COMPENSATE)):
            for path in (target, target.with_suffix(".json")):
                check_output(path, force=force)
        for embedded in subjects:
            variants = _compressed(embedded, ratios, folder, seed, tick)
            rows.extend(_measure(embedded, variants, batch_size, repeats, threads, keep=out is not None))
            tick()
    return Demo(
        rows=tuple(rows),
        threads=threads,
        batch_size=batch_size,
        repeats=repeats,
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        environment={"onnxgrail": __version__, **environment(providers=CPU, threads=threads)},
    )


def _folder(out: Path | None) -> contextlib.AbstractContextManager[Path]:
    if out is None:
        return scratch()
    make_folder(out)
    return contextlib.nullcontext(out)


def _target(folder: Path, name: str, ratio: float, compensate: str) -> Path:
    return folder / f"{name}.{ratio:g}.{compensate}.onnx"


def _compressed(
    embedded: Any, ratios: Sequence[float], folder: Path, seed: int, tick: Callable[[], None]
) -> list[_Variant]:
    """Return the dense model and all compressed ones, dense first."""
    from onnxgrail.commands.compress import compress

    variants: list[_Variant] = []
    for ratio, compensate in product(ratios, COMPENSATE):
        target = _target(folder, embedded.name, ratio, compensate)
        result = compress(
            embedded.model,
            target,
            ratio=ratio,
            allocate="uniform",  # the same widths with and without compensation
            compensate=compensate,
            data=embedded.calibration,
            held_out=embedded.heldout,
            seed=seed,
            force=True,
        )
        result.report.save(target.with_suffix(".json"), force=True)
        sizes = result.report.data["model"]
        if not variants:
            variants.append(_Variant(0.0, "", Path(embedded.model), sizes["params_before"], sizes["macs_before"]))
        variants.append(_Variant(ratio, compensate, target, sizes["params_after"], sizes["macs_after"]))
        tick()
    return variants


def _measure(
    embedded: Any, variants: Sequence[_Variant], batch_size: int, repeats: int, threads: int, *, keep: bool
) -> Iterator[Row]:
    with np.load(embedded.heldout, allow_pickle=False) as file:
        feed = {name: file[name][:batch_size] for name in file.files if name != "labels"}
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(open_session(v.path, Setup(threads=threads, timed=True))) for v in variants]
        rounds = max(2, repeats)
        timings = take_turns(sessions, [feed] * len(sessions), least=rounds, most=rounds, seconds=0, warm=WARM_UP)
        for variant, session, times in zip(variants, sessions, summarise(timings), strict=True):
            value, interval = _judged(embedded, session)
            yield Row(
                model=embedded.name,
                ratio=variant.ratio,
                compensate=variant.compensate,
                metric=embedded.metric,
                score=value,
                score_interval=interval,
                params=variant.params,
                macs=variant.macs,
                bytes=variant.path.stat().st_size,
                latency_ms=times.median,
                spread_ms=times.spread,
                speedup=times.ratio,
                speedup_interval=times.interval,
                file=str(variant.path) if keep and variant.compensate else None,
            )


def _judged(embedded: Any, session: Session) -> tuple[float, tuple[float, float] | None]:
    """Return the score on held-out data, and its confidence interval."""
    from onnxgrail.models import scores

    samples = scores(embedded, lambda feed: list(session.run(feed).values()))
    right, labels = samples.sum(axis=0).tolist()
    if embedded.metric == "accuracy":
        return right / labels, intervals.of_count(right, labels)

    def perplexity(sums: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(sums[..., 0] / sums[..., 1]))

    return float(perplexity(samples.sum(axis=0))), intervals.of_samples(samples, perplexity)
