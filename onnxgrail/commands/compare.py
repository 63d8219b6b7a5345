"""Compare two models on the same data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.feeds.data import Source
from onnxgrail.calibration.feeds.reading import Numbers, Sampling, reading_of
from onnxgrail.calibration.feeds.signature import signature_of, stays
from onnxgrail.calibration.matched import common_batch, counted_macs, loaded, runnable
from onnxgrail.calibration.observe import probe_feed
from onnxgrail.calibration.runtime.custom import Libraries
from onnxgrail.calibration.runtime.custom import custom_ops as registered
from onnxgrail.calibration.runtime.latency import single, times_of
from onnxgrail.calibration.runtime.session import Setup
from onnxgrail.calibration.supply import given, ran
from onnxgrail.errors import ModelError, UsageError
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.mapped import check_unchanged, unchanged
from onnxgrail.graph.io.model_file import HEAVY
from onnxgrail.graph.rewrite.interface import Port, between, fit
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.comparison import Comparison, gates, loss_of, weigh
from onnxgrail.report.environment import calibration_entry


@checked
def compare(
    a: Any,
    b: Any,
    *,
    data: Source | None = None,
    samples: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    tokenizer: str | Path | None = None,
    sequence_length: int | None = None,
    image_mean: Numbers = None,
    image_std: Numbers = None,
    image_form: Sequence[str] | None = None,
    contents: Mapping[str, str] | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    min_cosine: float | None = None,
    max_nmse: float | None = None,
    max_loss: float | None = None,
    latency: bool = False,
    custom_ops: Libraries = (),
    progress: Progress = silent,
) -> Comparison:
    """Run two models on the same feeds and compare every output.

    If the data have labels, or the inputs are texts and the model predicts the next token, the result also holds top-1
    accuracy or perplexity of both models for the outputs with logits.

    Args:
        a: the reference model: a path, bytes, an `onnx.ModelProto`, `onnx_ir.Model` or `onnx_graphsurgeon.Graph`.
        b: the model that is judged.
        data: as for `compress`; None uses random inputs.
        samples: maximum number of samples.
        batch_size: samples per feed if the model's batch size is open.
        seed: of sampling and random inputs.
        input_shapes: shapes of random inputs.
        tokenizer: a tokenizers JSON file, for text.
        sequence_length: maximum number of tokens per sample, for text.
        image_mean: subtracted from the pixels of images, in 0..1, one number or one per channel.
        image_std: divisor of the pixels after that.
        image_form: `bgr`, and `pad` or `stretch` instead of cropping images.
        contents: by name of an output, what it holds, as for `compress`.
        providers: ONNX Runtime execution providers.
        min_cosine: gate on the mean cosine of every floating-point output.
        max_nmse: gate on the normalized squared error of every floating-point output.
        max_loss: gate on the upper bound of the loss that `compress` limits; needs data.
        latency: also time both models on one sample, in turn.
        custom_ops: as for `compress`.
        progress: called once per feed.

    Returns:
        Comparison: fidelity of all outputs, sizes, gates and latency.

    Raises:
        ModelError: a model cannot be read or run, or the two differ in inputs, outputs or output shapes.
        DataError: the data do not fit.
        UsageError: a gate is set that needs data or a floating-point output, and there is none.
    """
    if max_loss is not None and data is None:
        raise UsageError("--max-loss needs --data: a loss on random inputs says nothing about real ones")
    paths, (first, second) = loaded([a, b])
    reading = reading_of(
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        image_mean=image_mean,
        image_std=image_std,
        image_form=image_form,
        input_shapes=input_shapes,
    )
    sampling = Sampling(samples=samples, batch_size=common_batch((first, second)) or batch_size, seed=seed)
    ports = between(first, second)
    _check_sizes(first, second, ports)
    heavy = max(model_file.weight_bytes(model) for model in (first, second)) > HEAVY
    setup = Setup.as_is(providers) if heavy else Setup(providers=providers)
    sources = runnable(first, paths[0]), runnable(second, paths[1])
    run = functools.partial(run_both, Pair(*sources, ports), setup=setup, texts=True, progress=progress)
    with registered(custom_ops), unchanged(first), unchanged(second):
        batches, tally = ran(first, lambda: given(data, first, reading, sampling, contents), run)
        outputs, signature = tally.results(), signature_of(first)
        some = batches.first()
        feed = some if stays(some, signature) else probe_feed(some, signature)
        one, other = single(feed, signature), some if common_batch([second]) else feed
        for model in (first, second):
            check_unchanged(model)
        loss = None if batches.synthetic else loss_of(tally)
        unlike = batches.unlike([(output.judged, output.top1_reference) for output in outputs])
        return Comparison(
            latency=times_of(sources, (one, fit(one, ports)), providers=providers) if latency else None,
            a=weigh(first, paths[0], "A", macs=counted_macs(first, feed, providers)),
            b=weigh(second, paths[1], "B", macs=counted_macs(second, fit(other, ports), providers)),
            outputs=outputs,
            calibration=calibration_entry(replace(batches, notes=(*batches.notes, *filter(None, [unlike])))),
            loss=loss,
            gates=tuple(gates(outputs, loss, min_cosine=min_cosine, max_nmse=max_nmse, max_loss=max_loss)),
        )


def _check_sizes(first: ir.Model, second: ir.Model, ports: Sequence[Port]) -> None:
    """Check that no input has other sizes in one model than in the other, but for what onnxgrail has narrowed.

    Raises:
        ModelError: one has, so that the same data cannot feed both.
    """
    cut = {(port.name, port.axis) for port in ports}
    others = {entry.name: entry for entry in signature_of(second)}
    for entry in signature_of(first):
        other = others.get(entry.name)
        if entry.shape is None or other is None or other.shape is None or len(entry.shape) != len(other.shape):
            continue
        pairs = enumerate(zip(entry.shape, other.shape, strict=True))
        odd = [axis for axis, (a, b) in pairs if isinstance(a, int) and isinstance(b, int) and a != b]
        if any((entry.name, axis) not in cut for axis in odd):
            raise ModelError(f"the models take inputs of other sizes: A {entry}, B {other}")
