"""Measured kernels of a model at some widths, by the node of the model that each belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import onnx_ir as ir

from onnxgrail.allocation.measures import ledger_of
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.runtime.blocking import channel_block
from onnxgrail.calibration.runtime.latency import single
from onnxgrail.calibration.runtime.profile import Kernel, Profile, profiles_of
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import Block, Feed, Recipe
from onnxgrail.errors import OnnxGrailError, StoppedError
from onnxgrail.graph.cost.counting import CONVOLUTIONS, PRODUCTS
from onnxgrail.graph.io.model_file import HEAVY, copy, weight_bytes
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.graph.trace.facts import key
from onnxgrail.machine.steps.codec import Codec, Record

NARROWER = ((0.25, True), (0.5, False), (0.75, False))  # further models: share of every block that goes, odd widths
DIGITS = 2  # of a time; more are noise
NEAR = 8  # nodes between a fused node's output and the product in it
RUNTIME = ("fused ", "InsertedPrecisionFreeCast_")  # beginnings of names; the second of float32 in place of float16
BLOCKED = "_nchwc"  # end of the names of kernels on channels in blocks

Durations = Mapping[str, float]
"""Node key -> milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The kernels at some widths.

    Attributes:
        widths: block name -> kept units; other blocks keep all.
        work: time of the kernels that compute a node.
        moves: time of the kernels that ONNX Runtime inserted to convert a node's output.
        blocked: keys of the convolutions and pools whose kernel has channels in blocks.
        ms: of an undisturbed run.
    """

    widths: Mapping[str, int]
    work: Durations
    moves: Durations
    blocked: tuple[str, ...]
    ms: float

    @property
    def share(self) -> float:
        """Return the share of the time that is attributed to nodes."""
        return min(1.0, (sum(self.work.values()) + sum(self.moves.values())) / self.ms) if self.ms else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels of a model, at full widths first; none if they were not measured.

    Attributes:
        measured: by widths.
        block: channels per block of the convolutions on this machine, 1 if none has blocks.
        note: why nothing was measured; empty if it was.
    """

    measured: tuple[Measured, ...] = ()
    block: int = 1
    note: str = ""


def measured_kernels(prepared: Prepared, blocks: Sequence[Block], recipe: Recipe) -> Kernels:
    """Measure the kernels of a model and of narrower ones, in turn, on one sample.

    Args:
        prepared: the model.
        blocks: those that may be narrowed.
        recipe: the options; the providers are used.
    """
    note = unmeasurable(prepared, recipe)
    if note:
        return Kernels(note=note)
    try:
        return _measured(prepared, blocks, recipe)
    except StoppedError:
        raise
    except OnnxGrailError as error:
        return Kernels(note=str(error.args[0]))


def unmeasurable(prepared: Prepared, recipe: Recipe) -> str:
    """Return why the kernels of a model cannot be measured; '' if that is to be tried."""
    if recipe.providers[0] not in CPU:
        return f"{recipe.providers[0]} reports no time of a kernel"
    return f"its weights take more than {HEAVY >> 30} GiB" if weight_bytes(prepared.model) > HEAVY else ""


def _measured(prepared: Prepared, blocks: Sequence[Block], recipe: Recipe) -> Kernels:
    widths: list[Mapping[str, int]] = [{}]
    for share, odd in NARROWER if blocks else ():
        widths.append({block.name: _narrower(block.units, 1 - share, odd=odd) for block in blocks})
    try:
        profiles = _profiles(prepared, widths, recipe)
    except StoppedError:
        raise
    except OnnxGrailError:  # narrower models may not run: the widths of blocks are proved one by one
        profiles = _profiles(prepared, widths[:1], recipe)
    return kernels_of(prepared.model, tuple(zip(widths, profiles, strict=False)))


def _profiles(prepared: Prepared, widths: Sequence[Mapping[str, int]], recipe: Recipe) -> tuple[Profile, ...]:
    """Profile the model at several widths, its nodes named by their keys."""
    named = replace(prepared, model=copy(prepared.model))
    for node in named.model.graph:
        node.name = key(node)
    ledgers = [ledger_of(prepared, each) for each in widths]
    feed = single(next(iter(prepared.batches)), signature_of(prepared.model))
    models = [narrowed(named, ledger) for ledger in ledgers]
    feeds = [fit(feed, between(prepared.model, model)) for model in models]
    return profiles_of([pack(model) for model in models], feeds, providers=recipe.providers)


def _narrower(units: int, share: float, *, odd: bool) -> int:
    """Return a share of the units: a multiple of the channels per block, or an odd number, which makes none."""
    multiple = channel_block()
    kept = max(1, round(units * share / multiple)) * multiple
    return min(units, kept) if not odd else max(1, round(units * share) // 2 * 2 - 1)


def kernels_of(model: ir.Model, profiles: Iterable[tuple[Mapping[str, int], Profile]]) -> Kernels:
    """Attribute the kernels of profiles to the nodes of a model.

    Args:
        model: the graph, at full widths.
        profiles: with the widths of the profiled models, the full ones first.
    """
    found = list[Measured]()
    for widths, profile in profiles:
        work: dict[str, float] = defaultdict(float)
        moves: dict[str, float] = defaultdict(float)
        blocked: dict[str, None] = {}
        for kernel, node, moved in attributed(model, profile.kernels):
            (moves if moved else work)[key(node)] += kernel.ms
            if kernel.name.endswith(BLOCKED):
                blocked[key(node)] = None
        total = sum(kernel.ms for kernel in profile.kernels)
        scale = min(1.0, profile.ms / total) if total else 1.0  # profiling itself takes time
        times = [{name: _rounded(ms * scale) for name, ms in each.items()} for each in (work, moves)]
        one = Measured(
            widths=dict(widths), work=times[0], moves=times[1], blocked=tuple(blocked), ms=_rounded(profile.ms)
        )
        found.append(one)
    return Kernels(measured=tuple(found), block=channel_block() if any(one.blocked for one in found) else 1)


def durations(
    models: Sequence[ir.Model], feed: Feed, providers: Sequence[str], *, bare: bool = False
) -> list[dict[str, float]]:
    """Measure the milliseconds of every node of some models, in turn, with those of kernels that convert its output.

    Args:
        models: the graphs; their nodes have different names.
        feed: what all of them read.
        providers: the execution providers.
        bare: without the time that measuring a kernel takes, by which two kernels seem slower than one that is fused.

    Raises:
        ModelError: ONNX Runtime does not run one of them.
    """
    named = [model.clone() for model in models]
    for node in (node for model in named for node in model.graph):
        node.name = key(node)
    found = []
    profiles = profiles_of([pack(model) for model in named], [feed] * len(named), providers=providers)
    for model, profile in zip(models, profiles, strict=True):
        times: dict[str, float] = defaultdict(float)
        more = max(0.0, sum(kernel.ms for kernel in profile.kernels) - profile.ms) if bare else 0.0
        for kernel, node, _ in attributed(model, profile.kernels):
            times[node.name or ""] += max(0.0, kernel.ms - more / len(profile.kernels))
        found.append(dict(times))
    return found


def attributed(model: ir.Model, kernels: Sequence[Kernel]) -> list[tuple[Kernel, ir.Node, bool]]:
    """Return the kernels that belong to a node, with the node.

    A kernel bears the name of a node or of an output.  A kernel of the runtime that bears neither moves a tensor: that
    of the last kernel with such an output.

    Returns:
        Kernel, node, and True if it moves the node's output.
    """
    nodes = {value.name or "": node for node in model.graph for value in node.outputs if value.name}
    makers: dict[tuple[int, ...], ir.Node] = {}
    found = []
    for kernel in kernels:
        node = _named(kernel.name, nodes)
        moved = node is None
        if node is None:
            node = makers.get(kernel.took) or makers.get(kernel.gave)
        elif kernel.op in PRODUCTS:
            node = _product(node, kernel.op)
        if node is not None:
            found.append((kernel, node, moved))
            makers[kernel.gave] = node
    return found


def _named(name: str, nodes: Mapping[str, ir.Node]) -> ir.Node | None:
    """Return the node with the longest key that a kernel's name begins with, or else ends with."""
    for word in RUNTIME:
        name = name.removeprefix(word)
    ends = [n for n in range(len(name), 0, -1) if n == len(name) or not name[n].isalnum()]
    found = next((nodes[name[:n]] for n in ends if name[:n] in nodes), None)
    return found or next((nodes[name[n:]] for n in range(1, len(name)) if name[n:] in nodes), None)


def _product(node: ir.Node, op: str) -> ir.Node:
    """Return the product that was fused into a node; the node itself if there is none."""
    wanted = CONVOLUTIONS if op in CONVOLUTIONS else PRODUCTS - CONVOLUTIONS
    level = [node]
    for _ in range(NEAR):
        found = next((one for one in level if one.op_type in wanted), None)
        if found is not None:
            return found
        level = [made for one in level for value in one.inputs if value is not None if (made := value.producer())]
    return node


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def _record(kernels: Kernels) -> Record:
    notes = asdict(kernels)
    return Record(notes=notes | {"measured": list(notes["measured"])})


def _kernels(record: Record) -> Kernels:
    measured = (Measured(**{**each, "blocked": tuple(each["blocked"])}) for each in record.notes["measured"])
    return Kernels(measured=tuple(measured), block=record.notes["block"], note=record.notes["note"])


KERNELS = Codec(_record, _kernels)
"""The storage format of measured kernels, for `Steps.once`."""
