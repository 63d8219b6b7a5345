"""Prune one model with onnxsim, in a separate interpreter, because its versions may differ from those of the bench.

    python onnxsim_worker.py IN.onnx CALIB.npz OUT.onnx simplify|l2|wanda SPARSITY none|finetune [feeds]

With `feeds`, the first axis of each array counts whole feeds, and wanda works on the simplified model.  Prints the
version of onnxsim.  Does not import onnxgrail.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import onnx
import onnxsim

BATCH = 8


def main(source: str, data: str, target: str, base: str, sparsity: str, repair: str, rows: str = "") -> None:
    """Simplify, or prune and refit if requested, and save."""
    with np.load(data, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    count = len(next(iter(arrays.values())))
    batches = [{name: a[start : start + BATCH] for name, a in arrays.items()} for start in range(0, count, BATCH)]
    if rows == "feeds":
        batches = [{name: a[n] for name, a in arrays.items()} for n in range(count)]
    # Loaded again for every call, because it is undocumented if a call changes its argument.
    if base == "simplify":
        slim = onnxsim.simplify(onnx.load(source))[0]
    elif rows == "feeds":
        dense = onnxsim.simplify(onnx.load(source))[0]
        onnx.save(dense, target)
        source = target
        slim = onnxsim.apply_structured_wanda_pruning(dense, calibration_data=batches, sparsity=float(sparsity))
    elif base == "l2":
        slim = onnxsim.apply_structured_pruning(onnx.load(source), sparsity=float(sparsity))
    else:
        slim = onnxsim.apply_structured_wanda_pruning(
            onnx.load(source), calibration_data=batches, sparsity=float(sparsity)
        )
    if repair == "finetune" and elements(slim) < elements(onnx.load(source)):
        slim = onnxsim.apply_pruning_finetune(onnx.load(source), slim, calibration_data=batches)
    onnx.save(slim, target)
    print(onnxsim.__version__)


def elements(model: onnx.ModelProto) -> int:
    """Return the number of weights, to skip the refit of a model that was not pruned."""
    return sum(math.prod(weight.dims) for weight in model.graph.initializer)


if __name__ == "__main__":
    main(*sys.argv[1:])
