"""Simplify a narrowed graph with onnxslim."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.errors import ModelError, OutputError
from onnxgrail.graph.io.model_file import LIMIT, load, save, weight_bytes
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.io.tails import cut, joined
from onnxgrail.machine.files.temporary import scratch

FOLDED = 1024  # size limit of folded constants, used if folding makes the model larger


@dataclass(frozen=True, kw_only=True, slots=True)
class Simplified:
    """Numbers of nodes before and after."""

    nodes_before: int
    nodes_after: int


def simplify(model: ir.Model) -> tuple[ir.Model, Simplified]:
    """Return the model with constants folded and nodes fused or removed, and the numbers of nodes.

    Raises:
        ModelError: onnxslim fails, its result does not load, or the model is over 2 GiB.
        OutputError: there is no room for temporary files.
    """
    import onnxslim

    before = len(model.graph)
    if weight_bytes(model) > LIMIT:
        raise ModelError("--simplify: the model is over 2 GiB", hint="Simplify the written file with onnxslim itself")
    try:
        with scratch() as folder:
            path = folder / "narrowed.onnx"
            core, tail = cut(model)
            save(core, path)
            found = load(onnxslim.slim(onnx.load(path)))
            if weight_bytes(found) > weight_bytes(model):  # it has expanded repetitions of small constants
                found = load(onnxslim.slim(onnx.load(path), size_threshold=FOLDED))
            with open_session(pack(found), Setup.as_is()):
                pass  # it can leave inputs of nodes without a source
    except OutputError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error.args[0] if error.args else error}".split())[:300]
        raise ModelError(f"--simplify: onnxslim failed: {text}", hint="Leave out --simplify") from error
    found.metadata_props.update(model.metadata_props)
    found = joined(found, tail)
    return found, Simplified(nodes_before=before, nodes_after=len(found.graph))
