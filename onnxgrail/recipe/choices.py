"""Types of the keywords of library calls, for editors and type checkers.

A `Recipe` is built from them.  None means no choice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from onnxgrail.machine.progress import Progress

Words = str | Iterable[str]
Number = str | float
Numbers = float | Sequence[float]


class DataChoices(TypedDict, total=False):
    """Keywords for data, and for the device on which models run."""

    samples: int | None
    batch_size: int
    seed: int
    providers: Words
    input_shapes: Mapping[str, tuple[int, ...]] | None
    contents: Mapping[str, str] | None
    tokenizer: str | os.PathLike[str] | None
    sequence_length: int | None
    image_mean: Numbers | None
    image_std: Numbers | None
    image_form: str | Sequence[str] | None


class RefineChoices(DataChoices, total=False):
    """Keywords of `refine_model`."""

    refine: Words | None
    ic_rank: int | None
    budget_seconds: float | None
    check: bool
    min_cosine: float | None


class Choices(RefineChoices, total=False):
    """Keywords of `compress`: the fields of `Recipe`."""

    ratio: float | None
    unit_ratio: float | None
    max_loss: Number | None
    minimize: str
    target_params: Number | None
    target_macs: Number | None
    target_size: Number | None
    target_latency: str | None
    widths: Mapping[str, int] | None
    bits: Mapping[str, int] | None
    only_bits: bool
    only_widths: bool
    effort: str
    allocate: str
    blocks: Words
    include: str | None
    exclude: str | None
    selector: str
    reducer: str
    compensate: str
    fit: Words
    ridge: float
    norms: str
    method: Words
    grasp_layers: int | Words | None
    grasp_retain: float
    grasp_rank: str
    grasp_whiten: bool
    grasp_refit: bool
    closed_loop: bool
    round_to: int
    kv_io: bool
    keep_tokens: str | os.PathLike[str] | None
    keep_initializer_inputs: bool
    cache_budget: str | int
    simplify: bool
    quantize: str
    block_size: int
    symmetric: bool
    accuracy_level: int
    qdq: bool
    target: str | None
    strict: bool


class Options(Choices, total=False):
    """Keywords that `apply` passes on to `compress`: choices, and keywords of the call."""

    force: bool
    dry_run: bool
    save_as_external_data: bool | None
    stats: str | Path | None
    save_stats: str | Path | None
    resume: str | Path | None
    save_recipe: str | Path | None
    latency: bool
    curves: bool | None
    report: str | Path | Iterable[str | Path]
    metric: Any
    custom_ops: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
    group: Any
    progress: Progress
