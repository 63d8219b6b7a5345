"""The result of comparing two models: sizes, fidelity of all outputs, gates, latency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.found import Judged, judged_of
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.errors import UsageError
from onnxgrail.fidelity import Fidelity, Tally, entries, headline
from onnxgrail.fidelity.lines import lines_of, not_compared
from onnxgrail.fidelity.loss import worst_loss
from onnxgrail.fidelity.words import Headline, Speed, speed, told
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.model_file import bytes_on_disk
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.machine.plain import SCHEMA, Plain
from onnxgrail.report.summary import loss_text


@dataclass(frozen=True, slots=True)
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
class Comparison(Plain):
    """The fidelity of model `b` to model `a`, the sizes of both, and their latency per run if requested.

    The loss is that of the output that decides, as `--max-loss` limits it; None for random inputs.
    """

    a: Weight
    b: Weight
    outputs: tuple[Fidelity, ...]
    calibration: Mapping[str, Any]
    loss: Judged | None = None
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
        if self.calibration["synthetic"]:
            return not_compared(every)
        return lines_of(every, top=headline(self.outputs), rest="see the table")

    def loss_line(self) -> str | None:
        """Return the loss with its bound in words; None if it was not measured."""
        return None if self.loss is None else loss_text(asdict(self.loss))

    def speed(self) -> Speed | None:
        """Return the speedup of `b` over `a`; None if it was not measured."""
        return speed([asdict(one) for one in self.latency]) if self.latency else None

    def _judged(self) -> dict[str, Any]:
        on = "random" if self.calibration["synthetic"] else "given"
        return {"on": on, **{key: self.calibration[key] for key in ("source", "samples")}}

    def __repr__(self) -> str:
        sizes = [f"{one.path}: {one.params:,} parameters, {one.bytes:,} bytes" for one in (self.a, self.b)]
        verdicts = (
            ("Fidelity", self.headline()),
            ("Loss", self.loss_line()),
            ("Latency of one run", self.speed()),
        )
        told = [f"{label}: {verdict}" for label, verdict in verdicts if verdict is not None]
        return "\n".join([*sizes, *told, *self.output_lines()])

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        times = self.latency and [{"name": n, **asdict(one)} for n, one in zip("ab", self.latency, strict=True)]
        return {
            "schema": SCHEMA,
            "a": asdict(self.a),
            "b": asdict(self.b),
            "calibration": dict(self.calibration),
            "outputs": entries(self.outputs),
            "headline": headline(self.outputs),
            "judged": self._judged(),
            "loss": self.loss and asdict(self.loss),
            "gates": [asdict(gate) for gate in self.gates],
            "latency": times,
        }


def loss_of(tally: Tally) -> Judged | None:
    """Return the loss of the output that decides; None if no output can be compared."""
    worst = worst_loss(tally)
    return None if worst is None else judged_of(worst)


def gates(
    outputs: Sequence[Fidelity],
    loss: Judged | None,
    *,
    min_cosine: float | None,
    max_nmse: float | None,
    max_loss: float | None,
) -> Iterator[Gate]:
    """Yield the requested gates, checked for the worst output.

    Raises:
        UsageError: there is no floating-point output, or no output with a loss.
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
    if max_loss is not None:
        if loss is None:
            raise UsageError("a fidelity gate is set, but the model has no output with a loss")
        yield Gate(name="max_loss", limit=max_loss, value=loss.bound, output=loss.output, passed=loss.bound <= max_loss)


def weigh(model: ir.Model, path: Path | None, label: str, *, macs: int | None = None) -> Weight:
    """Return the size of a loaded model with its files, or of the file it would be; `label` names a model in memory."""
    size = len(to_bytes(model, run=False)) if path is None else bytes_on_disk(model, path)
    return Weight(path=label if path is None else str(path), params=counting.parameters(model), macs=macs, bytes=size)
