"""Convert a model to a newer version of the standard operators."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx.version_converter import convert_version

from onnxgrail.errors import ModelError, OutputError
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.machine.files.temporary import scratch

STATED = 11  # the first opset whose Resize states which positions it reads


def opset_of(model: ir.Model) -> int:
    """Return the version of the standard operators."""
    return model.opset_imports.get("", 0)


def raised(model: ir.Model, opset: int) -> ir.Model:
    """Return a copy of a model of up to 2 GiB with a newer opset, made by the converter of `onnx`.

    The converter leaves out how a `Resize` of an old opset reads its input, and newer ones then read other positions:
    it is added here. Compare the outputs before you use the result.

    Raises:
        ModelError: the converter fails.
        OutputError: there is no room for temporary files.
    """
    before = opset_of(model)
    try:
        with scratch() as folder:
            save(model, folder / "old.onnx")
            made = convert_version(onnx.load(folder / "old.onnx"), opset)
    except OutputError:
        raise
    except Exception as error:  # the converter raises several types, some of them from C++
        text = " ".join(str(error).split())[:200]
        raise ModelError(
            f"the model has opset {before} and cannot be converted to {opset}: {text}",
            hint=f"Export it with opset {opset}",
        ) from error
    if before < STATED:
        for node in made.graph.node:
            if node.op_type == "Resize" and not node.domain:
                _state(node)
    found = load(made)
    found.metadata_props.update(model.metadata_props)
    return found


def _state(resize: onnx.NodeProto) -> None:
    """Write down how `Upsample` and the `Resize` of opset 10 read their input."""
    present = {attribute.name for attribute in resize.attribute}
    old = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    resize.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in old.items() if k not in present)
