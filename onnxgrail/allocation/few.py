"""The bits that weights may have, and the bytes of a file with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import onnx_ir as ir

from onnxgrail.allocation.measures import Few, Measure, measure_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize import is_quantised
from onnxgrail.calibration.quantize.light import storable
from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError, meant
from onnxgrail.graph.bits.folded import HALF, Codes
from onnxgrail.graph.bits.plan import FLOAT, TABLE, Form, Plan, plan_of, with_initializers
from onnxgrail.graph.cost.meter import Size
from onnxgrail.graph.flatten.branches import in_branch
from onnxgrail.graph.io.mapped import weights_of
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.rewrite.unique import origin
from onnxgrail.graph.rotate.marked import SECOND
from onnxgrail.machine.amounts import target_of

Bits = Mapping[str, int]
Moved = Callable[[Sequence["Rung"], Bits, Callable[[Bits], bool]], Bits]
"""`lowered` or `raised`."""
LEVELS = (8, 4)
COARSE = 128  # weights that share a scale in a file that has to be small
REMEMBERED = 4096  # most sizes of weights to remember
TRIES = 4  # bits that are tried until the built model is small enough
LITTLE = 0.1  # share of the bytes that bits must save at least, or widths alone decide


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """A weight that may have fewer bits.

    Attributes:
        weight: its name.
        shape: of the weight; whole: bytes that it takes now.
        forms: by bits, the most bits first.
        names: bytes of names and nodes that it needs with fewer bits.
        second: the weight beside it if its layer became two; it has as many bits, or the next number that it can have.
    """

    weight: str
    shape: tuple[int, ...]
    whole: int
    forms: Mapping[int, Form | Codes]
    names: float = 0.0
    second: Rung | None = None

    @property
    def least(self) -> int:
        """Return the fewest bits."""
        return min(self.forms)

    @property
    def coded(self) -> bool:
        """Return True if the weight has a scale per channel in its fewest bits, or none."""
        return isinstance(self.forms[self.least], Codes)

    @property
    def both(self) -> tuple[Rung, ...]:
        """Return the weight and the one beside it."""
        return (self,) if self.second is None else (self, self.second)

    def named(self, names: float) -> Rung:
        """Return the weight, and the one beside it, with bytes of names and nodes."""
        return replace(self, names=names, second=None if self.second is None else self.second.named(names))

    def bytes(self, bits: int) -> float:
        """Return the bytes that the weight takes."""
        form = self._form(bits)
        return self.whole if form is None else form.bytes(self.shape) + self.names

    def narrowed(self, bits: int, shape: tuple[int, ...]) -> float:
        """Return the bytes that it takes in another shape; a small one keeps its numbers if that takes less."""
        form, plain = self._form(bits), self.whole * math.prod(shape) // math.prod(self.shape)
        return plain if form is None else min(plain, form.bytes(shape) + self.names)

    def _form(self, bits: int) -> Form | Codes | None:
        """Return the form with so many bits, or the next number of them; None if all stay."""
        return self.forms.get(min((number for number in self.forms if number >= bits), default=FLOAT))


def rungs_of(prepared: Prepared, recipe: Recipe) -> tuple[tuple[Rung, ...], str]:
    """Return the weights whose bits count for a size: those that `--quantize` sets, or that are chosen.

    If weights could have fewer bits and do not, the second result says why.
    """
    if not recipe.counts_bits:
        return (), ""
    model = with_initializers(prepared.model)
    if not recipe.chooses_bits:
        plan = plan_of(model, prepared.survey.facts, recipe)
        coded = [rung for rung in _coded(model) if rung.weight in plan.coded.keys() - set(map(origin, plan.forms()))]
        coded = [replace(rung, forms={TABLE: rung.forms[TABLE]}) for rung in coded]
        return _paired([*_rungs(model, [plan]), *coded]), ""
    if is_quantised(model):
        return (), "weights keep their bits: the model is quantized already"
    if recipe.target == "tensorrt" and not recipe.qdq:
        return (), "weights keep their bits: TensorRT has no MatMulNBits; --qdq stores them in a form that it has"
    written = prepared.as_written()
    rungs, inside = _every(model, written, recipe), _in_branches(written.model)
    if sum(rung.whole - rung.bytes(rung.least) for rung in rungs) >= LITTLE * weight_bytes(model):
        return rungs, inside
    few = "weights keep their bits: few bytes of this model are weights of layers and tables that are looked up"
    return (), inside or _of_other_type(model) or few


def _of_other_type(model: ir.Model) -> str:
    """Return a note on weights of a type of which none has fewer bits, if most are."""
    sizes = Counter[ir.DataType]()
    for _, tensor in weights_of(model):
        sizes[tensor.dtype] += tensor.nbytes
    (most, _), *_ = sizes.most_common(1) or [(ir.DataType.FLOAT, 0)]
    if most not in (ir.DataType.DOUBLE, ir.DataType.BFLOAT16):
        return ""
    return f"weights keep their bits: most are {most.name.lower()}, and only float and float16 can have fewer"


def _in_branches(model: ir.Model) -> str:
    """Return a note on weights in branches and loops, if they are many: plans look into none."""
    every = list(weights_of(model))
    whole = sum(tensor.nbytes for _, tensor in every)
    size = sum(tensor.nbytes for v, tensor in every if any(use.node.graph is not model.graph for use in v.uses()))
    if size < LITTLE * whole:
        return ""
    return (
        f"{size / whole:.0%} of the bytes are weights in branches and loops, whose bits are not chosen; "
        "--quantize int8-weights stores them in 8 bits"
    )


def rungs_within(prepared: Prepared, recipe: Recipe) -> tuple[tuple[Rung, ...], str, Recipe]:
    """Return what `rungs_of` does, and the recipe, with larger blocks if the whole model would not fit its size.

    Fewer scales cost less than narrower blocks.
    """
    rungs, why = rungs_of(prepared, recipe)
    target = target_of(recipe)
    if target is None or not rungs or not recipe.chooses_bits or recipe.block_size >= COARSE:
        return rungs, why, recipe
    measure = measure_of(prepared, "size", bare=recipe.wants_size)
    least = with_bits(measure, rungs, fewest(rungs))
    if least({}) <= target.limit(measure.given):
        return rungs, why, recipe
    sized = replace(recipe, block_size=COARSE)
    return *rungs_of(prepared, sized), sized


def given_bits(prepared: Prepared, recipe: Recipe) -> Bits:
    """Return the bits of all weights if a recipe gives bits to some; the others keep theirs.

    Raises:
        UsageError: the model has no such weight, or the weight cannot have so many bits.
    """
    every = _every(with_initializers(prepared.model), prepared.as_written(), recipe) if recipe.bits else ()
    rungs = {rung.weight: rung for rung in every}
    for name, number in (recipe.bits or {}).items():
        if name not in rungs:
            text = f"bits name {name!r}, which is no weight that could have fewer bits"
            raise UsageError(text, hint=meant(name, rungs))
        if number not in (*rungs[name].forms, FLOAT):
            known = ", ".join(map(str, rungs[name].forms))
            raise UsageError(f"bits give the weight {name!r} {number} bits", hint=f"It can have {known} or {FLOAT}")
    return {name: (recipe.bits or {}).get(name, FLOAT) for name in rungs}


def _every(model: ir.Model, whole: Prepared, recipe: Recipe) -> tuple[Rung, ...]:
    """Return all weights of the model, as `with_initializers` returns it, that may have fewer bits.

    Args:
        model: the graph without branches.
        whole: with the graph as it is written.
        recipe: the choices.
    """
    facts, written = whole.survey.facts, with_initializers(whole.model)  # plans look into no branch
    rungs = _rungs(written, [plan_of(written, facts, recipe, {"": level}) for level in LEVELS])
    if recipe.target == "tensorrt":
        return _paired(rungs)
    known = {rung.weight for rung in rungs}
    coded = _coded(model)
    halves = {rung.weight: {HALF: rung.forms[HALF]} for rung in coded if rung.weight in known and HALF in rung.forms}
    coded = tuple(rung for rung in coded if rung.weight not in known)
    four = plan_of(written, facts, recipe, {rung.weight: min(LEVELS) for rung in coded}).in_four() if coded else {}
    more = {origin(name): {form.grid.bits: form} for name, form in four.items()}
    wide = tuple(replace(rung, forms={**halves.get(rung.weight, {}), **rung.forms}) for rung in rungs)
    return _paired([*wide, *(replace(rung, forms={**rung.forms, **more.get(rung.weight, {})}) for rung in coded)])


def _paired(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """Return the weights, those of layers that became two as one."""
    known = {rung.weight: rung for rung in rungs}
    first = [rung for rung in rungs if rung.weight.removesuffix(SECOND) not in known.keys() - {rung.weight}]
    return tuple(replace(rung, second=known.get(rung.weight + SECOND)) for rung in first)


def _rungs(model: ir.Model, plans: Sequence[Plan]) -> tuple[Rung, ...]:
    """Return the weights of some plans, the one with the most bits first."""
    found: dict[str, Rung] = {}
    for plan in plans:
        for name, form in plan.forms().items():
            tensor = model.graph.initializers[name].const_value
            assert tensor is not None
            first = origin(name)
            rung = found.setdefault(first, Rung(first, tuple(tensor.shape.numpy()), tensor.nbytes, {}))
            if form.bytes(rung.shape) < min((rung.bytes(bits) for bits in rung.forms), default=rung.whole):
                found[first] = replace(rung, forms={**rung.forms, form.grid.bits: form})
    return tuple(rung for rung in found.values() if rung.forms)


def _coded(model: ir.Model) -> tuple[Rung, ...]:
    """Return the weights that a runtime converts from 8 or 16 bits; those inside branches keep theirs."""
    own = {name for name, value in model.graph.initializers.items() if not in_branch(value)}
    own |= {node.outputs[0].name or "" for node in model.graph if node.op_type == "Constant"}
    found = [one for one in storable(model) if one.name in own]
    return tuple(Rung(one.origin, one.array.shape, one.array.nbytes, one.forms()) for one in found)


def fewest(rungs: Sequence[Rung]) -> Bits:
    """Return the fewest bits of every weight."""
    return {rung.weight: rung.least for rung in rungs}


def with_bits(measure: Measure, rungs: Sequence[Rung], bits: Bits) -> Measure:
    """Return the measure of a file whose weights have these bits."""
    fewer = [(rung, bits[rung.weight]) for rung in rungs if bits.get(rung.weight, FLOAT) in rung.forms]
    parts = [(part, few) for rung, few in fewer for part in rung.both]
    saved = sum(part.whole - _bytes(part, few) for part, few in parts)
    return replace(measure, few=Few(saved, {part.weight: _size(part, few) for part, few in parts}))


@lru_cache(REMEMBERED)
def _bytes(rung: Rung, bits: int) -> float:
    """Return the bytes that a weight takes; a search asks for them with every cost."""
    return rung.bytes(bits)


@lru_cache(REMEMBERED)
def _size(rung: Rung, bits: int) -> Size:
    """Return a weight's bytes as a function of its shape; the same function each time, since `Meter` keeps results."""
    return partial(rung.narrowed, bits)


def plain(rungs: Sequence[Rung], fits: Callable[[Bits], bool]) -> Bits:
    """Return bits without knowing what they cost: all weights have the most bits that fit, the largest ones fewer.

    Args:
        rungs: the weights.
        fits: True if the file with some bits is small enough.
    """
    bits: dict[str, int] = dict.fromkeys((rung.weight for rung in rungs), FLOAT)
    for level in LEVELS:
        for rung in sorted(rungs, key=lambda rung: -rung.whole):
            if fits(bits):
                return bits
            if level in rung.forms:
                del bits[rung.weight]  # so that the last one is the last in order
                bits[rung.weight] = level
    return bits


def lowered(rungs: Sequence[Rung], bits: Bits, fits: Callable[[Bits], bool]) -> Bits:
    """Return bits that are lowered by one more level until they fit, the first ones that were lowered first."""
    known = {rung.weight: rung for rung in rungs}
    fewer = dict(bits)
    for weight, now in sorted(bits.items(), key=lambda item: item[1] == FLOAT):
        if fits(fewer):
            break
        fewer[weight] = max((level for level in known[weight].forms if level < now), default=now)
    return fewer


def held(
    limit: float,
    counted: Callable[[Bits], float],
    moved: Callable[[Callable[[Bits], bool]], Bits],
    size: Callable[[Bits], float | None],
) -> Bits | None:
    """Return bits with which the built model stays within a limit, though it may be a little larger than counted.

    Args:
        limit: in bytes.
        counted: bytes with some bits.
        moved: returns bits that are small enough.
        size: bytes of the built model; None if it is not built.
    """
    most = limit
    for _ in range(TRIES):
        bits = moved(partial(_fits, counted, most))
        real = size(bits)
        if real is None or real <= limit:
            return bits
        most = counted(bits) - (real - limit)
    return None


def _fits(counted: Callable[[Bits], float], most: float, bits: Bits) -> bool:
    return counted(bits) <= most


def raised(rungs: Sequence[Rung], bits: Bits, fits: Callable[[Bits], bool]) -> Bits:
    """Return bits that are raised again where they fit, the last ones that were lowered first."""
    known = {rung.weight: rung for rung in rungs}
    more = dict(bits)
    for weight, least in reversed(list(bits.items())):
        for level in [*sorted(known[weight].forms), FLOAT]:
            if level > least and fits({**more, weight: level}):
                more[weight] = level
    return more
