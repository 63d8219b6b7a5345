"""Write the files of an embedded model: ONNX, data, and its entry in the manifest.

Only the training scripts use this module; torch is imported inside functions, so that reading the embedded models
needs numpy alone.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxgrail.models import Array, Embedded, folder, score

if TYPE_CHECKING:
    import onnx
    import torch

OPSET = 20

# The exporter records the origin of every node.  Reports print the scopes; stack traces hold absolute paths of the
# exporting machine, and class names depend on the way a script was started.
_KEPT_METADATA = frozenset({"pkg.torch.onnx.name_scopes"})

_HEADER = """\
# Embedded trained models.  The training scripts write this file: `python -m onnxgrail.models.<script>`.
# `blocks` counts what a survey is expected to find, by kind.
"""


def seed_everything(seed: int) -> None:
    """Fix torch's random stream, thread count and choice of kernels.

    One thread, because the order of a sum, and so the trained weights, would depend on the number of cores.
    """
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def export(
    module: torch.nn.Module,
    example: torch.Tensor,
    path: Path,
    *,
    input_name: str,
    dynamic: Mapping[int, str],
) -> None:
    """Export a one-input, one-output module to a single file with inline weights.

    Args:
        module: switched to evaluation mode, so that batch norms are folded into their convolutions.
        example: an input; each axis in `dynamic` should be at least 2 long, or the exporter fixes it.
        path: of the ONNX file.
        input_name: name of the graph input; the output is called `logits`.
        dynamic: names of the dynamic axes of the input, by axis.
    """
    import onnx
    import torch

    module.eval()
    program = torch.onnx.export(
        module,
        (example,),
        dynamo=True,
        opset_version=OPSET,
        external_data=False,
        input_names=[input_name],
        output_names=["logits"],
        dynamic_shapes=(dict.fromkeys(dynamic, torch.export.Dim.DYNAMIC),),
        verbose=False,
    )
    assert program is not None  # only the TorchScript exporter returns None
    model = program.model_proto
    name_axes(model, dynamic)
    strip_metadata(model)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def name_axes(model: onnx.ModelProto, dynamic: Mapping[int, str]) -> None:
    """Replace the exporter's symbols (`s77`) by the names that users read in error messages."""
    graph = model.graph
    shape = graph.input[0].type.tensor_type.shape
    names = {shape.dim[axis].dim_param: name for axis, name in dynamic.items()}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in names:
                dim.dim_param = names[dim.dim_param]


def strip_metadata(model: onnx.ModelProto) -> None:
    """Remove the metadata on the origin of the file, but keep the module scopes of the nodes."""
    graph = model.graph
    for owner in (model, graph, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        del owner.metadata_props[:]
    for node in graph.node:
        kept = [entry for entry in node.metadata_props if entry.key in _KEPT_METADATA]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    graph.doc_string = model.doc_string = ""


def write_npz(path: Path, **arrays: Any) -> None:
    """Save compressed arrays; numpy dates the members 1980, so equal arrays give equal files."""
    np.savez_compressed(path, **arrays)


def write(
    files: Embedded,
    module: torch.nn.Module,
    calibration: Mapping[str, Array],
    heldout: Mapping[str, Array],
    *,
    dynamic: Mapping[int, str],
) -> None:
    """Write the files of a one-input module; the calibration data give the input's name, `dynamic` as for `export`."""
    import torch

    write_npz(files.calibration, **calibration)
    write_npz(files.heldout, **heldout)
    ((name, array),) = calibration.items()
    export(module, torch.from_numpy(array[:2]), files.model, input_name=name, dynamic=dynamic)


def metric(files: Embedded, module: torch.nn.Module) -> float:
    """Return the metric of a torch module, computed as for an ONNX file."""
    import torch

    module.eval()
    with torch.no_grad():
        judged: float = score(files, lambda feed: [module(torch.from_numpy(array)).numpy() for array in feed.values()])
    return judged


def parameters(path: Path) -> int:
    """Return the number of floating-point weights in an ONNX file, after folding."""
    import onnx

    weights = onnx.load(path).graph.initializer
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
    return sum(math.prod(weight.dims) for weight in weights if weight.data_type in floats)


def sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe(
    files: Embedded,
    *,
    task: str,
    data: str,
    data_licence: str,
    judged: Mapping[str, float],
    seconds: int,
    blocks: Mapping[str, int],
) -> None:
    """Write and print the manifest entry of a model whose files are written.

    Args:
        files: the model.
        task: the task of the model.
        data: the training data.
        data_licence: the license of the data.
        judged: the metric of the model, called `dense`, and of its variants.
        seconds: of training.
        blocks: the expected number of blocks, by kind.
    """
    entry: dict[str, Any] = {
        "script": f"{files.name}.py",
        "task": task,
        "data": data,
        "data_licence": data_licence,
        "parameters": parameters(files.model),
        "metric": files.metric,
        **{key: round(value, 4) for key, value in judged.items()},
        "train_seconds": seconds,
        "blocks": dict(blocks),
    }
    record(files.name, entry, [files.model, files.calibration, files.heldout], folder() / "manifest.toml")
    print(entry)


def record(name: str, entry: Mapping[str, Any], files: Sequence[Path], manifest: Path) -> None:
    """Replace the entry of one model in the manifest, including the checksums of its files."""
    models: dict[str, Any] = {}
    if manifest.exists():
        models = tomllib.loads(manifest.read_text(encoding="utf-8"))
    models[name] = {**entry, "sha256": {file.name: sha256(file) for file in files}}
    sections = [_HEADER, *(_section(key, models[key]) for key in sorted(models))]
    manifest.write_text("\n".join(sections), encoding="utf-8")


def _section(title: str, table: Mapping[str, Any]) -> str:
    """Return the TOML of a table: scalars first, then tables of scalars; the manifest needs no more."""
    lines = [f"[{title}]"]
    nested: list[str] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            nested.append(_section(f"{title}.{key}", value))
        else:
            lines.append(f"{_key(key)} = {_scalar(value)}")
    return "\n".join([*lines, "", *nested])


def _key(text: str) -> str:
    return text if text.replace("_", "").isalnum() else f'"{text}"'


def _scalar(value: object) -> str:
    # These strings contain no quotes or backslashes, so they need no escaping.
    return f'"{value}"' if isinstance(value, str) else str(value)
