"""Compare two models on the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.both import Pair, run_both
from onnxgrail.calibration.branching import look_once
from onnxgrail.calibration.feeds.data import Source
from onnxgrail.calibration.feeds.reading import Numbers, Sampling, reading_of
from onnxgrail.calibration.feeds.signature import Signature, describe, signature_of
from onnxgrail.calibration.observe import probe_feed
from onnxgrail.calibration.runtime.custom import Libraries
from onnxgrail.calibration.runtime.custom import custom_ops as registered
from onnxgrail.calibration.runtime.latency import single, times_of
from onnxgrail.calibration.runtime.session import Setup
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.calibration.supply import given
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError, UsageError
from onnxgrail.fidelity import Fidelity, entries, headline
from onnxgrail.fidelity.lines import lines_of, not_compared
from onnxgrail.fidelity.words import Headline, Speed, speed, told
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.interop import from_any
from onnxgrail.graph.io.mapped import check_unchanged, unchanged
from onnxgrail.graph.io.model_file import HEAVY, bytes_on_disk
from onnxgrail.graph.io.serial import Packed, pack, to_bytes
from onnxgrail.graph.io.widen import has_bfloat16
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.graph.trace.facts import bodies, key
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.files.paths import check_input, path_of
from onnxgrail.machine.plain import SCHEMA, to_json
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.environment import calibration_entry

# Ops that multiply, but that `cost.macs` does not count: a model with them would seem lighter than it is.
UNCOUNTED = frozenset({
    "QGemm", "Attention", "QAttention", "MultiHeadAttention", "GroupQueryAttention", "Einsum",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """The size of a model: parameters, MACs per sample (None: not counted), and bytes including external data."""

    path: str
    params: int
    macs: int | None
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A limit, the worst value over the outputs, and the result of the check."""

    name: str
    limit: float
    value: float
    output: str
    passed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The fidelity of model `b` to model `a`, the sizes of both, and their latency per sample if requested."""

    a: Weight
    b: Weight
    outputs: tuple[Fidelity, ...]
    calibration: Mapping[str, Any]
    gates: tuple[Gate, ...] = ()
    latency: tuple[Times, ...] | None = None

    @property
    def gates_passed(self) -> bool:
        """Return True if all gates hold."""
        return all(gate.passed for gate in self.gates)

    def headline(self) -> Headline | None:
        """Return the verdict on the worst output in words; None if no output has a distance."""
        verdict = headline(self.outputs)
        return None if verdict is None else told(verdict, self._judged())

    def output_lines(self) -> tuple[str, ...]:
        """Return further lines on the outputs; for random inputs, the outputs that were not compared."""
        every = entries(self.outputs)
        return not_compared(every) if self.calibration["synthetic"] else lines_of(every, top=headline(self.outputs))

    def speed(self) -> Speed | None:
        """Return the speedup of `b` over `a`; None if it was not measured."""
        return speed([asdict(one) for one in self.latency]) if self.latency else None

    def _judged(self) -> dict[str, Any]:
        on = "random" if self.calibration["synthetic"] else "given"
        return {"on": on, **{key: self.calibration[key] for key in ("source", "samples")}}

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        sizes = {key: {f: getattr(w, f) for f in Weight.__slots__} for key, w in (("a", self.a), ("b", self.b))}
        gates = [{f: getattr(gate, f) for f in Gate.__slots__} for gate in self.gates]
        data = {
            "calibration": dict(self.calibration),
            "outputs": entries(self.outputs),
            "headline": headline(self.outputs),
            "judged": self._judged(),
            "gates": gates,
        }
        times = self.latency and [{"name": n, **asdict(one)} for n, one in zip("ab", self.latency, strict=True)]
        return {"schema": SCHEMA} | sizes | data | {"latency": times}

    def to_json(self) -> str:
        """Return indented JSON."""
        return to_json(self.to_data())


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
    providers: Sequence[str] = ("CPUExecutionProvider",),
    min_cosine: float | None = None,
    max_nmse: float | None = None,
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
        providers: ONNX Runtime execution providers.
        min_cosine: gate on the mean cosine of every floating-point output.
        max_nmse: gate on the normalized squared error of every floating-point output.
        latency: also time both models on one sample, in turn.
        custom_ops: as for `compress`.
        progress: called once per feed.

    Returns:
        Comparison: fidelity of all outputs, sizes, gates and latency.

    Raises:
        ModelError: a model cannot be read or run, or the two differ in inputs, outputs or output shapes.
        DataError: the data do not fit.
        UsageError: a gate is set and there is no floating-point output.
    """
    paths, (first, second) = opened([a, b])
    signature = signature_of(first)
    reading = reading_of(
        tokenizer=tokenizer,
        sequence_length=sequence_length,
        image_mean=image_mean,
        image_std=image_std,
        input_shapes=input_shapes,
    )
    batches = given(data, first, reading, Sampling(samples=samples, batch_size=batch_size, seed=seed))
    feed = probe_feed(batches.first(), signature)
    ports = between(first, second)
    heavy = max(model_file.weight_bytes(model) for model in (first, second)) > HEAVY
    setup = Setup.as_is(providers) if heavy else Setup(providers=providers)
    sources = runnable(first, paths[0]), runnable(second, paths[1])
    one = single(feed, signature)
    with registered(custom_ops), unchanged(first), unchanged(second):
        with batches.advising():
            outputs = run_both(Pair(*sources, ports), batches, setup, texts=True, progress=progress).results()
        for model in (first, second):
            check_unchanged(model)
        return Comparison(
            latency=times_of(sources, (one, fit(one, ports)), providers=providers) if latency else None,
            a=weigh(first, paths[0], "A", macs=counted_macs(first, feed, providers)),
            b=weigh(second, paths[1], "B", macs=counted_macs(second, fit(feed, ports), providers)),
            outputs=outputs,
            calibration=calibration_entry(batches),
            gates=tuple(gates(outputs, min_cosine=min_cosine, max_nmse=max_nmse)),
        )


def opened(models: Sequence[Any]) -> tuple[list[Path | None], list[ir.Model]]:
    """Return the paths of models (None for an object) and the loaded models, which take the same inputs.

    Raises:
        ModelError: a model cannot be read, or its inputs differ from those of the first.
    """
    paths = [path_of(model) for model in models]
    for path in paths:
        if path is not None:
            check_input(path)
    found = [model_file.load(from_any(model)) for model in models]
    for number, (path, model) in enumerate(zip(paths, found, strict=True), 1):
        same_inputs(signature_of(found[0]), signature_of(model), f"model {number}" if path is None else repr(str(path)))
    return paths, found


def runnable(model: ir.Model, path: Path | None) -> Packed | bytes | Path:
    """Return the model's file, or the model in memory if the file cannot be run."""
    if path is None:
        return pack(model)
    return to_bytes(model) if has_bfloat16(model) else path


def gates(outputs: Sequence[Fidelity], *, min_cosine: float | None, max_nmse: float | None) -> Iterator[Gate]:
    """Yield the requested gates, checked for the worst output.

    Raises:
        UsageError: there is no floating-point output.
    """
    cosines = [(o.cosine, o.name) for o in outputs if o.cosine is not None]
    errors = [(o.nmse, o.name) for o in outputs if o.nmse is not None]
    if (min_cosine is not None or max_nmse is not None) and not cosines:
        raise UsageError("a fidelity gate is set, but the model has no floating-point output")
    if min_cosine is not None:
        value, name = min(cosines)
        yield Gate(name="min_cosine", limit=min_cosine, value=value, output=name, passed=value >= min_cosine)
    if max_nmse is not None:
        value, name = max(errors)
        yield Gate(name="max_nmse", limit=max_nmse, value=value, output=name, passed=value <= max_nmse)


def weigh(model: ir.Model, path: Path | None, label: str, *, macs: int | None = None) -> Weight:
    """Return the size of a loaded model with its files, or of the file it would be; `label` names a model in memory."""
    size = len(to_bytes(model, run=False)) if path is None else bytes_on_disk(model, path)
    return Weight(path=label if path is None else str(path), params=counting.parameters(model), macs=macs, bytes=size)


def counted_macs(model: ir.Model, feed: Feed, providers: Sequence[str]) -> int | None:
    """Return the multiply-accumulates per sample of `feed`; None if they cannot be counted."""
    try:
        flat, facts = look_once(model, feed, providers)
    except ModelError:
        return None
    if any(node.op_type in UNCOUNTED for node in flat.graph):
        return None
    survey = trace(flat, facts)
    if any(bodies(node) and key(node) not in survey.repeated for node in flat.graph):
        return None
    sizes = {a.shape[0] if a.ndim else 1 for a in feed.values()}
    return counting.macs(flat, survey) // (sizes.pop() if len(sizes) == 1 else 1)


def same_inputs(wanted: Signature, got: Signature, label: str) -> None:
    """Check that two models take the same inputs (fixed dimensions may differ from open ones).

    Raises:
        ModelError: names, dtypes or ranks differ.
    """

    def shape(signature: Signature) -> list[tuple[str, str, int | None]]:
        return sorted((e.name, str(e.dtype), None if e.shape is None else len(e.shape)) for e in signature)

    if shape(wanted) != shape(got):
        raise ModelError(f"{label} takes {describe(got)}, expected {describe(wanted)}")
