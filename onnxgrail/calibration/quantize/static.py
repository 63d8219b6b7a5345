"""Static quantization to 8 bits by ONNX Runtime's tool, and the layers that compute in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from onnxgrail.calibration.quantize.choose import Choice, choose
from onnxgrail.calibration.quantize.eight import AFTER, BETWEEN, LAYERS, ROUNDED, Eight, Source, by_tool
from onnxgrail.calibration.quantize.light import Light, light_of
from onnxgrail.calibration.quantize.noise import MIXED, exceptions
from onnxgrail.calibration.quantize.placing import Costs, Durations, Placing, placing_of, timed, unmeasured
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.calibration.quantize.ranges import shares_of
from onnxgrail.calibration.quantize.shifts import shifts_in_8_bits, shifts_of
from onnxgrail.core import Feed
from onnxgrail.graph.bits.folded import folded, lifted
from onnxgrail.graph.bits.ranges import narrow, ranges_of, shift
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.writing import written_bytes

FASTER = 1.1  # speed relative to float from which 8 bits are worth their loss
NEAR = 1.1  # times the loss in float that 8 bits may have, if a search has made use of all that may be lost
SAFE = 0.8  # share of the target that weights in half precision have to reach on a few samples
MOST = 1 / 3  # share of the conversions of layers alone at which other nodes get 8 bits on unknown machines
SMALLER = 0.95  # share of the bytes below which a model is worth another order of its nodes
UNMEASURED = "the speed in 8 bits is not measured; the weights have 8 bits"
CHOSEN = "in 8 bits, they lose too much of the whole model"
SLOWER = "no layer is faster in 8 bits on this machine"
OTHER = "operators of {} are no standard ones"
EMPTY = "a weight without numbers has no scale"
GROUPED = "grouped transposed convolutions have no scale per channel"


@dataclass(frozen=True, slots=True)
class Trials:
    """Trials of candidates.

    Attributes:
        loss: the loss of a candidate.
        target: the loss that is small enough.
        speed: how many times as fast as the first model the second one runs on this machine.
        holds: returns True if the loss of a model on the samples that judge results is small enough.
        kernels: the milliseconds of the nodes of some models on this machine; None if they cannot be measured.
    """

    loss: Callable[[ir.Model], float]
    target: float
    speed: Callable[[ir.Model, ir.Model], float]
    holds: Callable[[ir.Model], bool] = lambda _: True
    kernels: Callable[[Sequence[ir.Model]], Sequence[Durations]] | None = None

    def before(self, step: Callable[[ir.Model], ir.Model]) -> Trials:
        """Return trials of candidates to which a step is applied first."""
        return replace(self, loss=lambda model: self.loss(step(model)), holds=lambda model: self.holds(step(model)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Static:
    """The inputs of static quantization.

    Attributes:
        feeds: calibration data; real: False if they are random, so that biases do not follow them.
        few: some of the data, by which ranges are narrowed; none if they are random.
        half: weights that get 16 bits where layers compute in float, or with `everywhere` the layers that do; None to
            choose them.
        symmetric: use zero points of zero and signed activations, as TensorRT requires; unsigned is faster on a CPU.
        everywhere: compute layers in 8 bits where this machine is faster in float, too, and store weights of the layers
            in float as float32: the model is for another machine.
        trials: measure which layers stay in float; without, those whose inputs have outliers do.
    """

    feeds: Sequence[Feed] = ()
    real: bool = True
    few: Sequence[Feed] = ()
    half: Collection[str] | None = None
    symmetric: bool = False
    everywhere: bool = False
    trials: Trials | None = None

    @property
    def known(self) -> Sequence[Feed]:
        """Return the data by which biases make up for rounding: none if they are random."""
        return self.feeds if self.real else ()


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
    bare = target.with_name("bare.onnx")
    save(lifted(load(source.read_bytes())), bare)
    prepare(bare, path)
    ready = load(path.read_bytes())
    loud = exceptions(ready, given.feeds, LAYERS)
    never = {node.name or "": GROUPED for node in ready.graph if _grouped(node)}
    never |= {n.name or "": EMPTY for n in ready.graph if any(v is not None and _is_empty(v) for v in n.inputs)}
    never |= {n.name or "": OTHER.format(n.domain) for n in ready.graph if n.op_type in LAYERS and n.domain}
    never |= {name: why for name, why in loud.items() if why == MIXED}  # a loss over all channels does not see it
    origin = Source(path, ready, loud, never)
    trials = given.trials
    if trials is not None and not given.everywhere:
        return _faster(origin, given, trials, _light(source, ready, given, trials), target)
    if given.everywhere and (trials is not None or given.half is not None):
        origin = _elsewhere(origin, given)
    if trials is not None:
        made, found, kept = _mixed(origin, given, trials, target, _unmeasured(origin))
        if trials.holds(made):
            save(made, target)
            return kept, _why(found, never)
    if given.half is not None and given.everywhere:
        eight = _eight(origin, given, target, _unmeasured(origin))
        save(eight.without(given.half), target)
        return eight.layers(given.half), CHOSEN
    if given.half is not None:
        save(light_of(load(source.read_bytes()), given.known).stored(given.half), target)
        return tuple(n.name or "" for n in origin.layers()), UNMEASURED
    float_ones = {**loud, **never}
    made = by_tool(origin, given.feeds, target, without=float_ones, symmetric=given.symmetric)
    _fit(made, ready, given)
    save(made if given.everywhere else folded(made, shifts=shifts_of(ready, given.known)), target)
    return tuple(float_ones), "; ".join(dict.fromkeys(float_ones.values()))


def _unmeasured(origin: Source) -> Placing:
    """Return the placing with as few conversions as may be."""
    return _placed(origin, unmeasured(origin.ready, [node.name or "" for node in (*origin.layers(), *origin.tables())]))


def _elsewhere(origin: Source, given: Static) -> Source:
    """Return the model for another machine: other nodes than layers get 8 bits if that saves most conversions."""
    plain = replace(origin, plain=True)
    few = not given.symmetric and _unmeasured(origin).conversions() <= MOST * _unmeasured(plain).conversions()
    return origin if few else plain


def _placed(origin: Source, costs: Costs) -> Placing:
    """Return the placing of all nodes that can have 8 bits."""
    able = [*origin.layers(), *origin.tables(), *origin.between()]
    return placing_of(origin.ready, {node.name or "" for node in able}, AFTER, costs)


def _faster(origin: Source, given: Static, trials: Trials, light: _Light, target: Path) -> tuple[tuple[str, ...], str]:
    """Write the model with layers in 8 bits, or only with weights in 8 bits; return layers in float, and the reason."""
    placing = _timed(origin, given, trials, target)
    brief = _eight(origin, _brief(given), target, placing)  # the ranges do not change the time
    if _in_float(brief):  # as single kernels tell; the whole model may be faster all the same
        placing = _unmeasured(origin)
        brief = replace(brief, placing=placing)
    slow = brief.layers()
    speed = 0.0 if _in_float(brief) else trials.speed(light.model, brief.without())
    why = f"in 8 bits, layers take {1 / speed:.2f} times as long on this machine" if speed else SLOWER
    if speed >= FASTER:
        most = trials.target if given.half is None else NEAR * light.choice.after
        made, found, kept = _mixed(origin, given, replace(trials, target=most), target, placing)
        speed = trials.speed(light.model, made)
        why = f"in 8 bits, layers that lose little take {1 / max(speed, 1e-9):.2f} times as long on this machine"
        small = found.after <= max(most, light.choice.after)
        if speed >= FASTER and small and trials.holds(made):
            save(made, target)
            return kept, _why(found, origin.never, len(slow) - len(origin.never))
        if speed >= FASTER:
            why = f"computing in 8 bits loses {found.after:.2%} on calibration samples"
            why += ", and more than may be lost on those that judge" if small else ""
    save(light.model, target)
    halves = f", {len(light.choice.layers)} of them 16" if light.choice.layers else ""
    return tuple(n.name or "" for n in origin.layers()), f"{why}; the weights have 8 bits{halves}"


def _in_float(eight: Eight) -> bool:
    """Return True if no layer is placed in 8 bits."""
    return len(eight.layers()) >= len(eight.origin.layers()) + len(eight.origin.never)


def _brief(given: Static) -> Static:
    """Return the inputs for a model that is only timed."""
    return replace(given, feeds=given.feeds[:1], few=())


def _timed(origin: Source, given: Static, trials: Trials, target: Path) -> Placing:
    """Return the placing by the kernels of this machine; without, with few conversions."""
    placing = _unmeasured(origin)
    if trials.kernels is None:
        return placing
    whole = _eight(origin, _brief(given), target, placing).whole
    times = trials.kernels([origin.ready, whole])
    return _placed(origin, timed(origin.ready, whole, times, given.feeds[0])) if times else placing


def _light(source: Path, ready: ir.Model, given: Static, trials: Trials) -> _Light:
    """Return the model that computes in float: with weights in 8 bits, some of them in half precision.

    It is made from the prepared model if folded normalizations make that smaller, else from the source: the prepared
    model has another order of nodes, which can be slower.
    """
    whole = load(source.read_bytes())
    if given.half is None:
        smaller = written_bytes(folded(lifted(ready))) < SMALLER * written_bytes(folded(lifted(whole)))
        light = light_of(ready if smaller else whole, given.known)
        found = light.halves(trials.loss, trials.target)
    else:
        light = light_of(whole, given.known)
        found = _halves(light, given.half, trials)
    told = replace(found, layers=tuple(dict.fromkeys((*found.layers, *light.small))))
    return _Light(light.stored(found.layers), told)


def _halves(light: Light, chosen: Collection[str], trials: Trials) -> Choice:
    """Return weights in half precision: those chosen in the whole model, and others if the narrowed one loses much."""
    made = light.stored(chosen)
    if trials.holds(made):
        loss = trials.loss(made)
        return Choice(tuple(chosen), loss, loss)
    return light.halves(trials.loss, SAFE * trials.target, worth=0.0, begun=chosen)


def _eight(origin: Source, given: Static, target: Path, placing: Placing) -> Eight:
    """Return the model in 8 bits."""
    between = [node.name or "" for node in origin.between()]
    whole = by_tool(origin, given.feeds, target, without=origin.never, between=between, symmetric=given.symmetric)
    _fit(whole, origin.ready, given)
    kinds = (*ROUNDED, *AFTER, *(() if origin.plain else BETWEEN))
    return Eight(origin, whole, placing, kinds, None if given.everywhere else shifts_of(origin.ready, given.known))


def _fit(whole: ir.Model, ready: ir.Model, given: Static) -> None:
    """Narrow the ranges of activations in place; then biases make up for mean errors of layers in 8 bits."""
    if given.few:
        narrow(whole, shares_of(ready, ranges_of(whole), given.few, LAYERS))
        shift(whole, shifts_in_8_bits(ready, whole, given.known))


def _mixed(
    origin: Source, given: Static, trials: Trials, target: Path, placing: Placing
) -> tuple[ir.Model, Choice, tuple[str, ...]]:
    """Return the model in which layers compute in 8 bits, except for some; and the layers in float."""
    eight = _eight(origin, given, target, placing)
    nodes = {*origin.layers(), *origin.between()}
    size = _size if given.everywhere else lambda node: placing.saved(node.name or "")
    sizes = {node.name or "": size(node) for node in origin.ready.graph if node in nodes}
    outliers = [name for name in origin.loud if name in sizes]
    found = choose(sizes, lambda names: trials.loss(eight.without(names)), target=trials.target, outliers=outliers)
    return eight.without(found.layers), found, eight.layers(found.layers)


def _why(found: Choice, never: Mapping[str, str], slow: int = 0) -> str:
    """Return the reasons why layers stay in float."""
    slower = [f"{slow} {'layer is' if slow == 1 else 'layers are'} slower in 8 bits on this machine"] if slow else []
    saved = f"the loss on calibration samples falls from {found.before:.2%} to {found.after:.2%}"
    return "; ".join([*slower, *([saved] if found.layers else []), *dict.fromkeys(never.values())])


def _size(layer: ir.Node) -> int:
    """Return the number of a layer's weights, 0 if both of its inputs are computed, and for other nodes."""
    if layer.op_type not in LAYERS:
        return 0
    weight = layer.inputs[1].const_value if layer.inputs[1] is not None else None
    return 0 if weight is None else weight.size


def _is_empty(value: ir.Value) -> bool:
    """Return True if a value is a constant without numbers."""
    return value.const_value is not None and value.const_value.size == 0


def _grouped(node: ir.Node) -> bool:
    """Return True for a grouped ConvTranspose, whose bias the tool scales as if every group were the whole."""
    return node.op_type == "ConvTranspose" and node.attributes.get_int("group", 1) > 1
