"""Quantization of weights and activations by the tools of ONNX Runtime, always after narrowing."""

from __future__ import annotations

import contextlib
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.calibration.runtime import half
from onnxgrail.calibration.runtime.noise import exceptions
from onnxgrail.calibration.runtime.session import CPU, reason, runtime
from onnxgrail.calibration.runtime.trial import Trial, try_out
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError, QuantisedError
from onnxgrail.graph.io.model_file import LIMIT, load, save, weight_bytes
from onnxgrail.graph.io.tails import cut, joined
from onnxgrail.machine.files.temporary import scratch
from onnxgrail.options import WEIGHTS

LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
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
FIRST_OPSET = 13  # per-channel scales need it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Quantised:
    """A quantized model.

    Attributes:
        model: the graph.
        kept: names of layers that stay in float.
        why: the reason.
        ops: number of operators of each type that were added.
        bytes_before, bytes_after: file size before and after quantization.
    """

    model: ir.Model
    kept: tuple[str, ...]
    why: str
    ops: Mapping[str, int]
    bytes_before: int
    bytes_after: int


def is_quantised(model: ir.Model) -> bool:
    """Return True if a graph computes with integers or stores weights as integers."""
    return any(node.op_type.startswith(MARKS) or node.op_type in INTEGER for node in model.graph)


def refuse(model: ir.Model, kind: str) -> None:
    """Check that a model can be quantized.

    Raises:
        QuantisedError: it is quantized already, or has half precision already.
        ModelError: it is too large, or its opset too old.
    """
    if is_quantised(model):
        raise QuantisedError(
            f"--quantize {kind}: the model is quantized already",
            hint="Narrow and quantize the float model it was made from; leave out --quantize to narrow it as it is",
        )
    if kind in WEIGHTS:
        return
    types = {value.dtype for value in model.graph.initializers.values()}
    if kind != "fp16" and any(_weight_type(node) == ir.DataType.FLOAT16 for node in model.graph):
        raise QuantisedError(
            f"--quantize {kind}: the model has half precision already, and ONNX Runtime quantizes float32 weights only",
            hint="Narrow and quantize the float32 model it was made from; leave out --quantize to narrow it as it is",
        )
    if kind == "fp16" and ir.DataType.FLOAT16 in types and ir.DataType.FLOAT not in types:
        raise QuantisedError("--quantize fp16: the model has half precision already", hint="Leave out --quantize")
    if ir.DataType.BFLOAT16 in types:
        raise ModelError(f"--quantize {kind}: ONNX Runtime does not quantize bfloat16", hint="Give the float32 model")
    if weight_bytes(model) > LIMIT:
        raise ModelError(
            f"--quantize {kind}: the model is over 2 GiB", hint="Quantize the written file with a tool for such models"
        )
    opset = model.opset_imports.get("", 0)
    if kind.startswith("int8") and opset < FIRST_OPSET:
        raise ModelError(
            f"--quantize {kind} needs opset {FIRST_OPSET}, the model has {opset}", hint="Export it with a newer opset"
        )


def _weight_type(node: ir.Node) -> ir.DataType | None:
    """Return the dtype of a layer's weight; None for other nodes."""
    if node.op_type not in LAYERS or len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    return node.inputs[1].dtype if node.inputs[1].const_value is not None else None


def quantise(
    model: ir.Model,
    feeds: Iterable[Feed],
    kind: str,
    *,
    symmetric: bool = False,
    probe: Feed | None = None,
    providers: Sequence[str] = CPU,
) -> Quantised:
    """Quantize the model to `int8` (static, QDQ), `int8-dynamic` or `fp16`; inputs and outputs keep their types.

    The result is tried in a child process.  Nodes that crash ONNX Runtime in half precision stay in float32.

    Args:
        model: a float model; not changed.
        feeds: calibration data, read once or twice, for `int8` only.
        kind: one of the three.
        symmetric: use zero points of zero and signed activations, as TensorRT requires; unsigned is faster on a CPU.
        probe: a small feed for the trial run; without it, the result is only opened.
        providers: execution providers for the trial run.

    Raises:
        ModelError: ONNX Runtime's tool fails, or ONNX Runtime crashes with the result.
    """
    runtime()
    core, tail = cut(model)
    kept: tuple[str, ...] = ()
    why = ""
    with scratch() as folder, _quiet():
        source, target = folder / "narrowed.onnx", folder / "quantised.onnx"
        save(core, source)
        trial = partial(_tried, core, target, probe, providers)
        try:
            if kind == "fp16":
                kept, why, found = _halve(source, target, trial)
            elif kind == "int8-dynamic":
                _dynamic(source, target)
                found = trial()
            else:
                kept, why = _static(source, list(feeds), target, symmetric=symmetric)
                found = trial()
        except (ModelError, OSError):
            raise
        except Exception as error:  # the tool raises many types on graphs it does not support
            raise ModelError(
                f"--quantize {kind}: {type(error).__name__}: {reason(error)}",
                hint="The narrowed model without --quantize is not affected",
            ) from error
        if found.died:
            hint = "The narrowed model without --quantize is not affected"
            raise ModelError(f"--quantize {kind}: {found.problem} when it opens or runs the result", hint=hint)
        made = joined(load(target.read_bytes()), tail)
        sizes = source.stat().st_size, target.stat().st_size
    return Quantised(
        model=made, kept=kept, why=why, ops=added(model, made), bytes_before=sizes[0], bytes_after=sizes[1]
    )


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


def _halve(source: Path, target: Path, trial: Callable[[], Trial]) -> tuple[tuple[str, ...], str, Trial]:
    """Return names of the nodes that stay in float32, the reason, and the trial of the written file."""

    def make(blocked: Sequence[str]) -> Trial:
        half.convert(source, target, blocked)
        return trial()

    first = make(())
    kept = half.culprits(source, make) if first.problem else ()
    last = make(kept) if first.problem else first
    return kept, f"in half precision {first.problem}" if kept else "", last


def _plain(source: Path) -> onnx.ModelProto:
    """Load a model without recorded shapes, which would contradict weights that a tool transposes."""
    proto: onnx.ModelProto = onnx.load(source)
    del proto.graph.value_info[:]
    return proto


def added(before: ir.Model, after: ir.Model) -> dict[str, int]:
    """Return the number of operators of each type that `after` has more than `before`."""
    counts = Counter(node.op_type for node in after.graph)
    counts.subtract(Counter(node.op_type for node in before.graph))
    return {name: number for name, number in sorted(counts.items()) if number > 0}


def _dynamic(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        _plain(source),
        target,
        op_types_to_quantize=list(DYNAMIC),
        per_channel=True,
        reduce_range=True,  # as in `_static`
        weight_type=QuantType.QInt8,
    )


def _static(source: Path, feeds: list[Feed], target: Path, *, symmetric: bool) -> tuple[tuple[str, ...], str]:
    """Write the statically quantized model; return names of layers that stay in float, and the reason."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next((dict(feed) for feed in self.left), None)

    first = target.with_name("prepared.onnx")
    # Fold normalization into convolutions first, or tensors between them would be rounded twice.
    quant_pre_process(source, first, skip_symbolic_shape=True)
    _flatten_biases(first)
    ready = load(first.read_bytes())
    loud = exceptions(ready, feeds, LAYERS)
    weights = ready.graph.initializers
    tables = [
        node.name or ""
        for node in ready.graph
        if node.op_type == "Gather" and (node.inputs[0] is None or node.inputs[0].name not in weights)
    ]
    quantize_static(
        first,
        target,
        Reader(),
        per_channel=True,
        # Weights of 7 bits: sums of 8-bit products saturate in the kernels of x86 processors without VNNI.
        reduce_range=not symmetric,
        activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=[*LAYERS, "Gather"],
        nodes_to_exclude=[*loud, *tables],
        extra_options={"ActivationSymmetric": symmetric},
    )
    return tuple(loud), "; ".join(dict.fromkeys(loud.values()))


def _flatten_biases(path: Path) -> None:
    """Reshape Gemm biases (1, n) to (n,): skl2onnx writes two axes, and the tool takes the first as channels."""
    proto: onnx.ModelProto = onnx.load(path)
    nodes = proto.graph.node
    biases = {node.input[2] for node in nodes if node.op_type == "Gemm" and len(node.input) > 2}
    biases -= {name for node in nodes for name in (node.input[:2] if node.op_type == "Gemm" else node.input)}
    rows = [t for t in proto.graph.initializer if t.name in biases and len(t.dims) == 2 and t.dims[0] == 1]
    if rows:
        for tensor in rows:
            del tensor.dims[0]
        del proto.graph.value_info[:]
        onnx.save(proto, path)


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
