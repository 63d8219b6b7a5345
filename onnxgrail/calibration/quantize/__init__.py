"""Quantization of weights and activations by the tools of ONNX Runtime, always after narrowing."""

from __future__ import annotations

import contextlib
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.calibration.quantize import half
from onnxgrail.calibration.quantize.eight import LAYERS
from onnxgrail.calibration.quantize.prepare import declare_types, name_nodes
from onnxgrail.calibration.quantize.static import Static, quantise_static
from onnxgrail.calibration.runtime.session import CPU, runtime
from onnxgrail.calibration.runtime.trial import Trial, try_out
from onnxgrail.calibration.runtime.wording import reason
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError, OnnxGrailError
from onnxgrail.graph.bits.folded import is_folded
from onnxgrail.graph.io.likeness import like
from onnxgrail.graph.io.model_file import LIMIT, load, save, weight_bytes
from onnxgrail.graph.io.tails import Tail, cut, joined
from onnxgrail.machine.files.temporary import scratch
from onnxgrail.options import WEIGHTS

DYNAMIC = ("MatMul", "Gemm", "Gather", "LSTM", "Attention", "EmbedLayerNormalization")  # no CPU kernel for Conv
MARKS = (
    "QLinear",
    "DequantizeLinear",
    "QuantizeLinear",
    "DynamicQuantize",
    "MatMulNBits",
    "GatherBlockQuantized",
    "QAttention",
    "QGemm",
)
INTEGER = ("ConvInteger", "MatMulInteger", "MatMulIntegerToFloat")
LARGE = "its numbers are too large for half precision"
FIRST_OPSET = 13  # a scale per channel needs it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quantised:
    """A quantized model.

    Attributes:
        model: the graph.
        kept: names of layers that stay in float.
        why: the reason.
        ops: number of operators of each type that were added.
    """

    model: ir.Model
    kept: tuple[str, ...]
    why: str
    ops: Mapping[str, int]


def is_quantised(model: ir.Model) -> bool:
    """Return True if a graph computes with integers or stores weights as integers."""
    return is_folded(model) or any(n.op_type.startswith(MARKS) or n.op_type in INTEGER for n in model.graph)


def refuse(model: ir.Model, kind: str) -> None:
    """Check that a model can be quantized.

    Raises:
        ModelError: it is quantized already, has half precision already, or is too large.
    """
    if is_quantised(model):
        raise ModelError(
            f"--quantize {kind}: the model is quantized already",
            hint="Narrow and quantize the float model it was made from; leave out --quantize to narrow it as it is",
        )
    if kind in WEIGHTS:
        return
    types = {value.dtype for value in model.graph.initializers.values()}
    if kind != "fp16" and any(_weight_type(node) == ir.DataType.FLOAT16 for node in model.graph):
        raise ModelError(
            f"--quantize {kind}: the model has half precision already, and ONNX Runtime quantizes float32 weights only",
            hint="Narrow and quantize the float32 model it was made from; int8-weights and int4 take this one",
        )
    if kind == "fp16" and ir.DataType.FLOAT16 in types and ir.DataType.FLOAT not in types:
        raise ModelError("--quantize fp16: the model has half precision already", hint="Leave out --quantize")
    if ir.DataType.BFLOAT16 in types:
        raise ModelError(f"--quantize {kind}: ONNX Runtime does not quantize bfloat16", hint="Give the float32 model")
    if weight_bytes(model) > LIMIT:
        raise ModelError(
            f"--quantize {kind}: the model is over 2 GiB", hint="Quantize the written file with a tool for such models"
        )


def _weight_type(node: ir.Node) -> ir.DataType | None:
    """Return the dtype of a layer's weight; None for other nodes."""
    if node.op_type not in LAYERS or len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    return node.inputs[1].dtype if node.inputs[1].const_value is not None else None


def quantise(
    model: ir.Model,
    kind: str,
    *,
    given: Static | None = None,
    probe: Feed | None = None,
    providers: Sequence[str] = CPU,
    tried: bool = True,
) -> Quantised:
    """Quantize the model to `int8` (static), `int8-dynamic` or `fp16`; inputs and outputs keep their types.

    The result is tried in a child process.  Nodes that crash ONNX Runtime in half precision stay in float32.

    Args:
        model: a float model, for int8 of `FIRST_OPSET` at least; not changed.
        kind: one of the three.
        given: calibration data and more, for `int8` only.
        probe: a small feed for the trial run; without it, the result is only opened.
        providers: execution providers for the trial run.
        tried: False to leave the trial out, where only the size is of interest.

    Raises:
        ModelError: ONNX Runtime's tool fails, or ONNX Runtime crashes with the result.
        NothingToCompressError: for `int8`, ONNX Runtime replaces all outputs by constants.
    """
    runtime()
    core, tail = cut(model)
    kept: tuple[str, ...] = ()
    why = ""
    with scratch() as folder, _quiet():
        source, target = folder / "narrowed.onnx", folder / "quantised.onnx"
        save(core, source)
        trial = partial(_tried, core, target, probe, providers) if tried else Trial
        try:
            if kind == "fp16":
                wide = () if given is None else tuple(given.half or ())
                kept, why, found = _halve(source, target, trial, wide)
            elif kind == "int8-dynamic":
                _dynamic(source, target)
                found = trial()
            else:
                kept, why = quantise_static(source, target, _joining(given or Static(), tail))
                found = trial()
        except (OnnxGrailError, OSError):
            raise
        except Exception as error:  # the tool raises many types on graphs it does not support
            raise ModelError(
                f"--quantize {kind}: {type(error).__name__}: {reason(error)}",
                hint="The narrowed model without --quantize is not affected",
            ) from error
        if found.died:
            hint = "The narrowed model without --quantize is not affected"
            raise ModelError(f"--quantize {kind}: {found.problem} when it opens or runs the result", hint=hint)
        made = like(joined(load(target.read_bytes()), tail), model)
    return Quantised(model=made, kept=kept, why=why, ops=added(model, made))


def _joining(given: Static, tail: Tail) -> Static:
    """Return the inputs with trials of whole models: the nodes that were cut off follow."""
    if given.trials is None:
        return given
    return replace(given, trials=given.trials.before(lambda model: joined(model, tail)))


def _tried(model: ir.Model, target: Path, probe: Feed | None, providers: Sequence[str]) -> Trial:
    """Write the tool's result again as in the final file, and try to run it."""
    made = load(target.read_bytes())
    made.metadata_props.clear()
    made.metadata_props.update(model.metadata_props)
    made.graph.name = model.graph.name
    save(made, target)  # the tools leave shapes of intermediate tensors in their files
    inputs = [value.name for value in made.graph.inputs if value.name not in made.graph.initializers]
    arrays = [np.asarray(probe[name]) for name in inputs if name] if probe is not None else []
    return try_out(target, arrays, providers=providers)


def _halve(
    source: Path, target: Path, trial: Callable[[], Trial], wide: tuple[str, ...]
) -> tuple[tuple[str, ...], str, Trial]:
    """Return names of the nodes that stay in float32, the reason, and the trial of the written file.

    Args:
        source: the model in float32.
        target: the file in half precision.
        trial: of that file.
        wide: nodes with numbers that are too large.
    """

    def make(blocked: Sequence[str]) -> Trial:
        half.convert(source, target, (*wide, *blocked))
        return trial()

    first = make(())
    kept = half.culprits(source, make) if first.problem else ()
    last = make(kept) if first.problem else first
    why = [LARGE] * bool(wide) + [f"in half precision {first.problem}"] * bool(kept)
    return (*wide, *kept), "; ".join(why), last


def _plain(source: Path) -> onnx.ModelProto:
    """Load a model with types, but no recorded shapes, which would contradict weights that a tool transposes."""
    proto: onnx.ModelProto = onnx.load(source)
    del proto.graph.value_info[:]
    declare_types(proto)
    return proto


def added(before: ir.Model, after: ir.Model) -> dict[str, int]:
    """Return the number of operators of each type that `after` has more than `before`."""
    counts = Counter(node.op_type for node in after.graph)
    counts.subtract(Counter(node.op_type for node in before.graph))
    return {name: number for name, number in sorted(counts.items()) if number > 0}


def _dynamic(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    proto = _plain(source)
    name_nodes(proto.graph)
    ranks = {tensor.name: 0 if 0 in tensor.dims else max(len(tensor.dims), 1) for tensor in proto.graph.initializer}
    quantize_dynamic(
        proto,
        target,
        nodes_to_exclude=[node.name for node in proto.graph.node if _is_no_layer(node, ranks)],
        op_types_to_quantize=list(DYNAMIC),
        per_channel=True,
        reduce_range=True,  # as in `_static`
        weight_type=QuantType.QInt8,
    )


def _is_no_layer(node: onnx.NodeProto, ranks: Mapping[str, int]) -> bool:
    """Return True for nodes of another op than the tool takes them for, and for those with an empty weight or a vector.

    Args:
        node: any node.
        ranks: number of axes of each weight, 0 for an empty one.
    """
    least = 2 if node.op_type == "MatMul" else 1
    other = node.op_type == "Attention" and not node.domain
    return other or any(ranks.get(name, least) < least for name in node.input)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the tools' log messages and printed advice."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
