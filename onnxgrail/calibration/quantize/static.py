"""Static quantization to 8 bits by ONNX Runtime's tool, and the layers that compute in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.quantize.choose import Choice, choose
from onnxgrail.calibration.quantize.light import light_of
from onnxgrail.calibration.quantize.noise import MIXED, exceptions
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.calibration.quantize.shifts import shifts_of
from onnxgrail.core import Feed
from onnxgrail.graph.bits.exempt import exempted
from onnxgrail.graph.bits.folded import folded, lifted
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.writing import written_bytes

LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
ROUNDED = (*LAYERS, "Gather")
AFTER = ("Relu", "Clip")  # rounded too, or a layer's range would hold what they cut off
FASTER = 1.1  # speed relative to float from which 8 bits are worth their loss
NEAR = 1.1  # times the loss in float that 8 bits may have, if a search has made use of all that may be lost
SMALLER = 0.95  # share of the bytes below which a model is worth another order of its nodes
UNMEASURED = "the speed in 8 bits is not measured; the weights have 8 bits"
GROUPED = "grouped transposed convolutions have no scale per channel"


@dataclass(frozen=True, slots=True)
class Trials:
    """Trials of candidates.

    Attributes:
        loss: the loss of a candidate.
        target: the loss that is small enough.
        speed: how many times as fast as the first model the second one runs on this machine.
        holds: returns True if the loss of a model on the samples that judge results is small enough.
    """

    loss: Callable[[ir.Model], float]
    target: float
    speed: Callable[[ir.Model, ir.Model], float]
    holds: Callable[[ir.Model], bool] = lambda _: True

    def before(self, step: Callable[[ir.Model], ir.Model]) -> Trials:
        """Return trials of candidates to which a step is applied first."""
        return replace(self, loss=lambda model: self.loss(step(model)), holds=lambda model: self.holds(step(model)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Static:
    """The inputs of static quantization.

    Attributes:
        feeds: calibration data; real: False if they are random, so that biases do not follow them.
        half: weights that get 16 bits where layers compute in float; None to choose them.
        symmetric: use zero points of zero and signed activations, as TensorRT requires; unsigned is faster on a CPU.
        everywhere: compute layers in 8 bits where this machine is faster in float, too, and store weights of the layers
            in float as float32: the model is for another machine.
        trials: measure which layers stay in float; without, those whose inputs have outliers do.
    """

    feeds: Sequence[Feed] = ()
    real: bool = True
    half: Collection[str] | None = None
    symmetric: bool = False
    everywhere: bool = False
    trials: Trials | None = None

    @property
    def known(self) -> Sequence[Feed]:
        """Return the data by which biases make up for rounding: none if they are random."""
        return self.feeds if self.real else ()


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A prepared model.

    Attributes:
        path: its file; ready: the graph.
        loud: layers whose inputs have outliers, with that reason.
        never: layers that stay in float in any case, with the reason.
    """

    path: Path
    ready: ir.Model
    loud: Mapping[str, str]
    never: Mapping[str, str]

    def layers(self) -> list[ir.Node]:
        """Return the layers that can compute in 8 bits."""
        return [n for n in self.ready.graph if n.op_type in LAYERS and n.name not in self.never]


@dataclass(frozen=True, slots=True, eq=False)
class _Light:
    """A model with weights in 8 bits that computes in float, and the choice of weights in half precision."""

    model: ir.Model
    choice: Choice


def quantise_static(source: Path, target: Path, given: Static) -> tuple[tuple[str, ...], str]:
    """Write the quantized model; return names of layers that compute in float, and the reason.

    Layers compute in 8 bits if that is faster on this machine and the loss is small enough.  Otherwise only their
    weights have 8 bits.
    """
    path = target.with_name("prepared.onnx")
    prepare(source, path)
    ready = load(path.read_bytes())
    loud = exceptions(ready, given.feeds, LAYERS)
    never = {node.name or "": GROUPED for node in ready.graph if _grouped(node)}
    never |= {name: why for name, why in loud.items() if why == MIXED}  # a loss over all channels does not see it
    origin = _Source(path, ready, loud, never)
    trials = given.trials
    if trials is not None and not given.everywhere:
        return _faster(origin, given, trials, _light(source, ready, given, trials), target)
    if trials is not None:
        made, found = _mixed(origin, given, trials, target)
        if trials.holds(made):
            save(made, target)
            return (*found.layers, *never), _why(found, never)
    if given.half is not None and not given.everywhere:
        save(light_of(load(source.read_bytes()), given.known).stored(given.half), target)
        return tuple(n.name or "" for n in origin.layers()), UNMEASURED
    kept = {**loud, **never}
    made = _quantise(origin, given, target, without=list(kept))
    save(made if given.everywhere else folded(made, shifts=shifts_of(ready, given.known)), target)
    return tuple(kept), "; ".join(dict.fromkeys(kept.values()))


def _faster(origin: _Source, given: Static, trials: Trials, light: _Light, target: Path) -> tuple[tuple[str, ...], str]:
    """Write the model with layers in 8 bits, or only with weights in 8 bits; return layers in float, and the reason."""
    brief = replace(given, feeds=given.feeds[:1])  # the ranges do not change the time
    speed = trials.speed(light.model, _quantise(origin, brief, target, without=list(origin.never)))
    why = f"in 8 bits, layers take {1 / max(speed, 1e-9):.2f} times as long on this machine"
    if speed >= FASTER:
        most = trials.target if given.half is None else NEAR * light.choice.after
        made, found = _mixed(origin, given, replace(trials, target=most), target)
        speed = trials.speed(light.model, made)
        why = f"in 8 bits, layers that lose little take {1 / max(speed, 1e-9):.2f} times as long on this machine"
        small = found.after <= max(most, light.choice.after)
        if speed >= FASTER and small and trials.holds(made):
            save(made, target)
            return (*found.layers, *origin.never), _why(found, origin.never)
        if speed >= FASTER:
            why = f"computing in 8 bits loses {found.after:.2%} on calibration samples"
            why += ", and more than may be lost on those that judge" if small else ""
    save(light.model, target)
    halves = f", {len(light.choice.layers)} of them 16" if light.choice.layers else ""
    return tuple(n.name or "" for n in origin.layers()), f"{why}; the weights have 8 bits{halves}"


def _light(source: Path, ready: ir.Model, given: Static, trials: Trials) -> _Light:
    """Return the model that computes in float: with weights in 8 bits, some of them in half precision.

    It is made from the prepared model if folded normalizations make that smaller, else from the source: the prepared
    model has another order of nodes, which can be slower.
    """
    whole = load(source.read_bytes())
    if given.half is not None:
        made = light_of(whole, given.known).stored(given.half)
        loss = trials.loss(made)
        return _Light(made, Choice(tuple(given.half), loss, loss))
    smaller = written_bytes(folded(lifted(ready))) < SMALLER * written_bytes(folded(lifted(whole)))
    light = light_of(ready if smaller else whole, given.known)
    found = light.halves(trials.loss, trials.target)
    return _Light(light.stored(found.layers), found)


def _mixed(origin: _Source, given: Static, trials: Trials, target: Path) -> tuple[ir.Model, Choice]:
    """Return the model in which layers compute in 8 bits, except for some; and these."""
    whole = _quantise(origin, given, target, without=list(origin.never))
    shifts = {} if given.everywhere else shifts_of(origin.ready, given.known)

    def without(names: Collection[str]) -> ir.Model:
        made = exempted(whole, origin.ready, {*names, *origin.never}, ROUNDED, AFTER)
        return made if given.everywhere else folded(made, shifts=shifts)

    layers = {n.name or "": _size(n) for n in origin.layers()}
    outliers = [name for name in origin.loud if name in layers]
    found = choose(layers, lambda names: trials.loss(without(names)), target=trials.target, outliers=outliers)
    return without(found.layers), found


def _why(found: Choice, never: Mapping[str, str]) -> str:
    """Return the reasons why layers stay in float."""
    saved = f"the loss on calibration samples falls from {found.before:.2%} to {found.after:.2%}"
    return "; ".join([*([saved] if found.layers else []), *dict.fromkeys(never.values())])


def _quantise(origin: _Source, given: Static, target: Path, *, without: list[str]) -> ir.Model:
    """Write and return a model in which all layers but some are quantized, with ranges from the feeds."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(given.feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next((dict(feed) for feed in self.left), None)

    weights = origin.ready.graph.initializers
    tables = [
        node.name or ""
        for node in origin.ready.graph
        if node.op_type == "Gather" and (node.inputs[0] is None or node.inputs[0].name not in weights)
    ]
    quantize_static(
        origin.path,
        target,
        Reader(),
        per_channel=True,
        # Weights of 7 bits: sums of 8-bit products saturate in the kernels of x86 processors without VNNI.
        reduce_range=not given.symmetric,
        activation_type=QuantType.QInt8 if given.symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=[*ROUNDED, *AFTER],
        nodes_to_exclude=[*without, *tables],
        # ONNX Runtime drops a Relu or Clip that rounding replaces by itself; a layer in float still needs it.
        extra_options={"ActivationSymmetric": given.symmetric, "QDQKeepRemovableActivations": True},
    )
    return load(target.read_bytes())


def _size(layer: ir.Node) -> int:
    """Return the number of a layer's weights, 0 if both of its inputs are computed."""
    weight = layer.inputs[1].const_value if layer.inputs[1] is not None else None
    return 0 if weight is None else weight.size


def _grouped(node: ir.Node) -> bool:
    """Return True for a grouped ConvTranspose, whose bias the tool scales as if every group were the whole."""
    return node.op_type == "ConvTranspose" and node.attributes.get_int("group", 1) > 1
